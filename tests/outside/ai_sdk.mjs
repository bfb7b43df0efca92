// The AI SDK against a running server whose model takes functions: each provider's texts, objects and calls, whole and streamed.
import assert from "node:assert";
import { generateObject, generateText, streamObject, streamText, tool } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";

const baseURL = process.env.UNBIND_URL + "/v1", apiKey = "none", name = "unbind-demo";
const compatible = createOpenAICompatible({ name: "unbind", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true });
const openai = createOpenAI({ baseURL, apiKey });
const chats = {
  "compatible": compatible(name), "openai, responses": openai(name), "openai, chat": openai.chat(name),
  "anthropic": createAnthropic({ baseURL, apiKey })(name),
};
const completions = { "compatible, completions": compatible.completionModel(name), "openai, completions": openai.completion(name) };
const asked = { prompt: "A parser.", maxOutputTokens: 150, temperature: 0, maxRetries: 0, onError() {} };
const schema = z.object({ name: z.string(), on: z.boolean() });
const tools = { add: tool({ inputSchema: z.object({ a: z.number() }), execute: async ({ a }) => a + 1 }) };
let made = 0;
const done = (what) => { made++; console.log("ok", what); };

for (const [kind, model] of Object.entries({ ...chats, ...completions })) {
  const whole = await generateText({ ...asked, model });
  assert(whole.text.length > 0 && whole.usage.outputTokens > 0 && ["stop", "length"].includes(whole.finishReason)); done(`${kind}: text`);
  const stream = streamText({ ...asked, model });
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, whole.text); assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens); done(`${kind}: text, streamed`);
}
for (const [kind, model] of Object.entries(chats)) {
  const whole = (await generateObject({ ...asked, model, schema, prompt: "A flag." })).object;
  done(`${kind}: object`);
  const stream = streamObject({ ...asked, model, schema, prompt: "A flag." });
  let last;
  for await (const part of stream.partialObjectStream) last = part;
  assert.deepEqual(last, whole); done(`${kind}: object, streamed`);
  const demanded = { ...asked, model, tools, toolChoice: { type: "tool", toolName: "add" } };
  const called = await generateText(demanded);
  assert.equal(called.finishReason, "tool-calls"); assert.equal(called.toolResults.length, 1); done(`${kind}: call`);
  const calling = streamText(demanded), kinds = new Set();
  for await (const part of calling.fullStream) kinds.add(part.type);
  assert(kinds.has("tool-result")); assert.equal(await calling.finishReason, "tool-calls"); done(`${kind}: call, streamed`);
}
console.log(`${made} of 28`);

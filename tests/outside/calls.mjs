import OpenAI from "openai";
import assert from "node:assert";
const client = new OpenAI({ baseURL: process.env.UNBIND_URL + "/v1", apiKey: "none", maxRetries: 0 });
const model = "unbind-demo", prompt = "def add(first, second):\n", messages = [{ role: "user", content: "A parser." }];
const done = (name) => console.log("ok", name);

const whole = await client.completions.create({ model, prompt, max_tokens: 16, temperature: 0, logprobs: 1 });
assert(whole.usage.completion_tokens > 0 && whole.choices[0].logprobs.tokens.length > 0); done("completion");
let text = "", last;
for await (const chunk of await client.completions.create(
  { model, prompt, max_tokens: 16, temperature: 0, stream: true, stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.text ?? ""; last = chunk;
}
assert.equal(text, whole.choices[0].text); assert(last.usage.total_tokens > 0); done("completion, streamed");
const said = await client.chat.completions.create({ model, messages, max_completion_tokens: 16, temperature: 0, logprobs: true, top_logprobs: 2 });
text = "";
for await (const chunk of await client.chat.completions.create({ model, messages, max_completion_tokens: 16, temperature: 0, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(text, said.choices[0].message.content); done("chat, whole and streamed");
const runner = client.chat.completions.stream({ model, messages, max_completion_tokens: 16, temperature: 0 });
assert.equal(await runner.finalContent(), text); done("chat, the stream helper");
const filtered = await client.completions.create({ model, prompt, max_tokens: 16, temperature: 0, unbind: { modules: ["demo-a"] } }).withResponse();
assert.match(filtered.response.headers.get("x-unbind-modules"), /^demo-a@/); done("modules by the body");
assert((await client.models.list()).data.some((one) => one.id === model)); assert.equal((await client.models.retrieve(model)).id, model); done("models");
const fails = async (name, call, kind, more) => {
  await assert.rejects(call, (error) => { assert(error instanceof kind, error); more?.(error); return true; }); done(name);
};
await fails("tools are refused by name", () => client.chat.completions.create({ model, messages, tools: [{ type: "function", function: { name: "f" } }] }),
  OpenAI.BadRequestError, (error) => { assert.equal(error.param, "tools"); assert.equal(error.code, "unsupported_parameter"); });
await fails("another model", () => client.completions.create({ model: "other", prompt }), OpenAI.NotFoundError);
const asked = { model, input: "A parser.", max_output_tokens: 16, temperature: 0 };
const response = await client.responses.create(asked);
assert.equal(response.output_text, text); assert.equal(response.store, false);
assert.equal((await client.responses.stream(asked).finalResponse()).output_text, text); done("responses, whole and by the stream helper");
await fails("a kept response", () => client.responses.create({ ...asked, previous_response_id: response.id }), OpenAI.BadRequestError,
  (error) => assert.equal(error.param, "previous_response_id"));
await fails("embeddings", () => client.embeddings.create({ model, input: "x" }), OpenAI.NotFoundError);
await fails("too long", () => client.completions.create({ model, prompt: "word ".repeat(5000) }), OpenAI.BadRequestError,
  (error) => assert.equal(error.code, "context_length_exceeded"));
const aborted = new AbortController();
const stream = await client.completions.create({ model, prompt, max_tokens: 400, stream: true }, { signal: aborted.signal });
for await (const chunk of stream) { aborted.abort(); break; }
done("a stream given up");

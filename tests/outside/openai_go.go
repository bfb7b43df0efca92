// OpenAI's client for Go against a running server whose model takes functions: models, completions, chats, responses, errors.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
	"github.com/openai/openai-go/v3/shared"
)

const name = "unbind-demo"

var (
	client = openai.NewClient(option.WithBaseURL(os.Getenv("UNBIND_URL")+"/v1"), option.WithAPIKey("none"))
	ctx    = context.Background()
	made   int
)

func check(what string, holds bool, err error) {
	if err != nil || !holds {
		fmt.Println("FAILED", what, err)
		os.Exit(1)
	}
	made++
	fmt.Println("ok", what)
}

func main() {
	page, err := client.Models.List(ctx)
	check("models", err == nil && page.Data[0].ID == name, err)
	model, err := client.Models.Get(ctx, name)
	check("model", err == nil && model.Object == "model", err)

	prompt := openai.CompletionNewParamsPromptUnion{OfString: openai.String("def add(")}
	asked := openai.CompletionNewParams{Model: name, Prompt: prompt, MaxTokens: openai.Int(8), Logprobs: openai.Int(2), Seed: openai.Int(1)}
	whole, err := client.Completions.New(ctx, asked)
	check("completion", err == nil && len(whole.Choices[0].Logprobs.Tokens) == 8 && whole.Usage.CompletionTokens == 8, err)
	text, used := "", int64(0)
	asked.StreamOptions = openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)}
	parts := client.Completions.NewStreaming(ctx, asked)
	for parts.Next() {
		used += parts.Current().Usage.CompletionTokens
		for _, choice := range parts.Current().Choices {
			text += choice.Text
		}
	}
	check("completion, streamed", text == whole.Choices[0].Text && used == 8, parts.Err())

	messages := []openai.ChatCompletionMessageParamUnion{openai.DeveloperMessage("Write code."), openai.UserMessage("A parser.")}
	schema := map[string]any{"type": "object", "properties": map[string]any{"on": map[string]any{"type": "boolean"}}, "required": []string{"on"}}
	chat := openai.ChatCompletionNewParams{Model: name, Messages: messages, MaxCompletionTokens: openai.Int(30), Logprobs: openai.Bool(true), TopLogprobs: openai.Int(2)}
	said, err := client.Chat.Completions.New(ctx, chat)
	check("chat", err == nil && len(said.Choices[0].Logprobs.Content[0].TopLogprobs) == 2, err)
	chat.ResponseFormat.OfJSONSchema = &shared.ResponseFormatJSONSchemaParam{JSONSchema: shared.ResponseFormatJSONSchemaJSONSchemaParam{Name: "flag", Schema: schema}}
	said, err = client.Chat.Completions.New(ctx, chat)
	check("chat with a schema", err == nil && json.Valid([]byte(said.Choices[0].Message.Content)), err)
	chat.ResponseFormat.OfJSONSchema = nil

	chat.Tools = []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{Name: "put", Parameters: schema})}
	chat.ToolChoice.OfAuto = openai.String("required")
	said, err = client.Chat.Completions.New(ctx, chat) // the last of its calls may be cut by the limit
	check("call", err == nil && said.Choices[0].Message.ToolCalls[0].Function.Arguments != "", err)
	chunks, finished := openai.ChatCompletionAccumulator{}, 0
	stream := client.Chat.Completions.NewStreaming(ctx, chat)
	for stream.Next() {
		if !chunks.AddChunk(stream.Current()) {
			check("call, streamed", false, nil)
		}
		if _, is := chunks.JustFinishedToolCall(); is {
			finished++
		}
	}
	check("call, streamed", finished > 0 && chunks.Choices[0].Message.ToolCalls[0].Function.Name == "put", stream.Err())
	chat.Messages = append(messages, said.Choices[0].Message.ToParam())
	for _, call := range said.Choices[0].Message.ToolCalls {
		chat.Messages = append(chat.Messages, openai.ToolMessage("done", call.ID))
	}
	chat.ToolChoice.OfAuto = openai.String("none")
	_, err = client.Chat.Completions.New(ctx, chat)
	check("its calls and their results sent back", true, err)

	input := responses.ResponseNewParams{Model: name, Input: responses.ResponseNewParamsInputUnion{OfString: openai.String("A parser.")}, MaxOutputTokens: openai.Int(16)}
	response, err := client.Responses.New(ctx, input)
	check("response", err == nil && response.OutputText() != "" && response.Status == "incomplete", err)
	events, last := client.Responses.NewStreaming(ctx, input), ""
	for events.Next() {
		last = events.Current().Type
	}
	check("response, streamed", last == "response.incomplete", events.Err())

	var refused *openai.Error
	chat.Model = "other"
	_, err = client.Chat.Completions.New(ctx, chat)
	check("another model", errors.As(err, &refused) && refused.StatusCode == 404 && refused.Code == "model_not_found", nil)
	asked.MaxTokens = openai.Int(99999)
	parts = client.Completions.NewStreaming(ctx, asked)
	check("too long a stream", !parts.Next() && errors.As(parts.Err(), &refused) && refused.Code == "context_length_exceeded", nil)
	fmt.Println(made, "of 13")
}

"""Completions and streamed chats, as fast as they come: ``locust -f`` this file."""

from locust import HttpUser, constant, task

SAID = [{"role": "user", "content": "A parser."}]


class Editor(HttpUser):
    """One that always waits for an answer."""

    wait_time = constant(0)

    @task
    def whole(self) -> None:
        """A completion at once."""
        self.client.post("/v1/completions", json={"prompt": "def add(", "max_tokens": 8, "temperature": 0})

    @task
    def streamed(self) -> None:
        """A chat in events, which fails where its end does not come."""
        body = {"messages": SAID, "max_tokens": 8, "stream": True}
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as answer:
            if not b"".join(answer.iter_content(None)).endswith(b"data: [DONE]\n\n"):
                answer.failure("no end")

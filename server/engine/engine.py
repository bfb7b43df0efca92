"""What the service asks of an engine, whoever computes: requests in, parts of answers out, modules that can be named.

``embedded`` computes in this process; ``vllm`` has vLLM do it. Nothing above this folder asks which of them it is.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from server.engine.grammars import Grammars
from server.engine.modules import Counts, Gates, ModuleTable
from server.engine.refusals import PromptTooLong, QueueFull
from server.engine.request import Delta, Flight, GenerationRequest
from unbind_core.module import UnbindModule

OWN = 0.75  # of the queue, which the requests of one key may fill


@dataclass(frozen=True)
class EngineStats:
    """A snapshot for the metrics. ``slots``: requests that can run at once; ``steps`` and what follows: since the start.

    ``kv_usage``: the share of the memory for keys and values that running requests hold. None: this engine does not know.
    """

    running: int
    waiting: int
    slots: int
    steps: int
    failures: int
    preemptions: int | None = None
    cancelled: int | None = None
    kv_usage: float | None = None


def check_queue(waiting: int, own: int, limit: int, owner: str) -> None:
    """Raise QueueFull where so many requests fill a queue of ``limit``, or those of an ``owner`` with a key OWN of it."""
    if waiting >= limit:
        raise QueueFull(f"{waiting} requests wait already, and the queue holds {limit}; try again shortly")
    if owner and own >= OWN * limit:
        raise QueueFull(
            f"{own} requests of this key wait already, and {OWN:.0%} of the queue's {limit} places are the most"
        )


def check_fits(prompt: int, max_tokens: int, max_length: int, least: int = 0) -> None:
    """Raise PromptTooLong where a prompt and its answer together exceed what a request can have. ``least``: tokens of an answer
    that the engine makes although fewer are wanted.
    """
    if (over := prompt + max(least, max_tokens) - max_length) > 0:
        answer = f"max_tokens {max_tokens}" if max_tokens >= least else f"the {least} that this engine always makes"
        remedy = "shorten the prompt or lower max_tokens" if prompt + least <= max_length else "shorten the prompt"
        raise PromptTooLong(
            f"This model's maximum context length is {max_length} tokens; the prompt of {prompt} tokens and {answer} "
            f"exceed it by {over}; {remedy}"
        )


class Engine(ABC):
    """Built and closed by the application's lifespan; ``start`` before use. Methods may be called from any thread."""

    tokenizer: PreTrainedTokenizerBase
    modules: ModuleTable
    grammars: Grammars
    least_tokens = 0  # of an answer, for which a request must have room although none is wanted

    @abstractmethod
    def start(self) -> None:
        """Check that the model computes what it should, then begin to serve. Raises UnbindError."""

    def give_up(self) -> None:  # noqa: B027 - where a start takes no time there is nothing to do
        """Have a ``start`` that takes long end: it raises EngineStopped soon. Called from a signal's handler, too."""

    @abstractmethod
    def drain(self, timeout: float) -> bool:
        """Admit nothing more and wait until all that was admitted has ended; false where ``timeout`` seconds pass."""

    @abstractmethod
    def close(self) -> None:
        """Stop; requests still in flight end with an error."""

    @property
    @abstractmethod
    def draining(self) -> bool:
        """Whether new requests are refused because the server is about to end."""

    @property
    def healthy(self) -> bool:
        """Whether what computes the answers is there."""
        return True

    @property
    @abstractmethod
    def slots(self) -> int:
        """Requests that can run at the same time."""

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Prompt and answer tokens that one request can have."""

    @abstractmethod
    def submit(self, request: GenerationRequest) -> tuple[Flight, asyncio.Queue[Delta]]:
        """Queue a request at once and give back where its deltas arrive, on the running event loop.

        Raises QueueFull, PromptTooLong, EngineStopped.
        """

    @abstractmethod
    def cancel(self, flight: Flight) -> None:
        """End a request that nobody listens to any more; nothing happens if it is finished."""

    @abstractmethod
    def sync_modules(self, modules: Iterable[tuple[UnbindModule, str]]) -> Future[None]:
        """Make exactly these (module, digest) nameable; running requests keep the versions they were admitted with."""

    @abstractmethod
    def gates(self) -> Future[Gates]:
        """What the gates have done since the start."""

    def gate_counts(self) -> Future[Counts]:
        """Of this, module -> phase -> (positions evaluated, gates open)."""
        counts: Future[Counts] = Future()

        def told(gates: Future[Gates]) -> None:
            if (error := gates.exception()) is not None:
                counts.set_exception(error)
            else:
                counts.set_result(gates.result().counts)

        self.gates().add_done_callback(told)
        return counts

    @abstractmethod
    def stats(self) -> EngineStats:
        """How busy the engine is."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Stream one answer; leaving the iteration early ends the request. Raises as ``submit`` before the first delta."""
        flight, deltas = self.submit(request)
        try:
            while True:
                delta = await deltas.get()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self.cancel(flight)

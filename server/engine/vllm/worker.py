"""vLLM's worker with modules at its layers: loaded by vLLM in each process of the model, and asked by the engine over RPC."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from hashlib import sha256
from typing import Any

import torch
import zmq
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from server.collector import leave_at_once
from server.engine.vllm.edits import Edits
from server.engine.vllm.graphs import open_graphs
from server.engine.vllm.masks import GrammarMasks
from server.engine.vllm.sockets import leave_fault
from unbind_core.errors import UnbindError
from unbind_core.module import UnbindModule

_WORKERS = {"cpu": "vllm.v1.worker.cpu_worker.CPUWorker", "cuda": "vllm.v1.worker.gpu_worker.Worker"}
_Base: Any = resolve_obj_by_qualname(_WORKERS[current_platform.device_type])


def _told(start: Callable[..., Any]) -> Callable[..., Any]:
    """A step of a worker's start. Why it fails is left for the engine: vLLM tells whoever waits no more than that it did, and the
    reason in the middle of its log.
    """

    @wraps(start)
    def run(worker: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return start(worker, *args, **kwargs)
        except Exception as error:
            leave_fault(error)
            raise

    return run


class GatedWorker(_Base):  # type: ignore[misc]
    """The platform's worker; every method whose name begins with ``unbind`` is one that the engine calls."""

    edits: Edits

    @_told
    def init_device(self) -> None:
        """As ever. Where vLLM has bound its threads nobody may change their number, and it says so at every attempt: here that is
        no news, as edits choose their threads by their size.
        """
        leave_at_once()
        bound = torch.set_num_threads
        super().init_device()
        if torch.set_num_threads is not bound:
            torch.set_num_threads = lambda _: None  # type: ignore[assignment]

    @_told
    def load_model(self, **options: Any) -> None:
        """Load as ever, then put the edits behind the layers, before anything is compiled."""
        super().load_model(**options)
        wanted = self.vllm_config.additional_config["unbind"]
        self.edits = Edits(self.model_runner, wanted["columns"], wanted["looks"])
        self.unbind_layers = self.edits.install(self.model_runner.get_model(), wanted["layers"])
        open_graphs(self.model_runner)
        self._telling: Any = None
        self._digests: dict[str, str] = {}
        self._need_tokens(False)
        for processor in self.model_runner.input_batch.logitsprocs.all:
            if isinstance(processor, GrammarMasks):
                processor.needs = self._need_tokens

    def _need_tokens(self, needed: bool) -> None:
        """Whether the newest tokens must be here before the next are sampled. vLLM has them waited for in every batch where
        there is a logits processor that is not its own; ours reads them only for answers of a form.
        """
        self.model_runner.input_batch.logitsprocs_need_output_token_ids = needed

    @_told
    def determine_available_memory(self) -> int:
        """What is left for keys and values beside the gates' memory of the same pages; and beside modules, unless somebody has said
        how much keys and values take.
        """
        available = int(super().determine_available_memory())
        if self.vllm_config.cache_config.kv_cache_memory_bytes is None:
            available -= self.edits.room_for_modules(self.model_config.get_hidden_size())
        return int(available * self.edits.share_of_pages(self.model_runner.get_kv_cache_spec().values()))

    @_told
    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the pages, and the gates' rows of them."""
        super().initialize_from_config(kv_cache_config)
        self.edits.allocate(kv_cache_config)

    def execute_model(self, scheduler_output: Any) -> Any:
        """One step; what its gates did is told before its tokens are."""
        self.edits.passed.clear()
        self.edits.scheduled = scheduler_output.num_scheduled_tokens
        try:
            output = super().execute_model(scheduler_output)
        finally:
            self.edits.scheduled = {}
        if self.edits.passed and self._telling is not None:
            told = self.edits.told()
            if self._tells:
                self._telling.send_json([self.unbind_layers[0], told])
        return output

    def unbind_open(self, address: str) -> dict[str, Any]:
        """Connect to where the engine listens; tells who this is. Of ranks that compute the same, the first tells."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        if self._telling is not None:
            self._telling.close(linger=0)
        self._telling = zmq.Context.instance().socket(zmq.PUSH)
        self._telling.connect(address)
        self._tells = get_tensor_model_parallel_rank() == 0
        return {"layers": self.unbind_layers, "tells": self._tells, "rank": self.rank, "process": os.getpid()}

    def unbind_sync(self, added: dict[str, bytes], kept: list[str]) -> dict[str, str]:
        """Take modules in by key, and all out but those that are ``kept``; tells the SHA-256 of the bytes of each there is, by key.
        A module for a layer of another process is kept as well, so that all ranks tell the same. What a call that failed took in
        is out with the next.
        """
        for key in set(self.edits.bank.names) - set(kept):
            self.edits.bank.remove(key)
        for key, data in added.items():
            self.edits.bank.add(UnbindModule.from_bytes(data).known_as(key))
            self._digests[key] = sha256(data).hexdigest()
        return {key: self._digests[key] for key in self.edits.bank.names}

    def unbind_sets(self, added: dict[str, dict[str, float]], removed: list[str]) -> int:
        """Know these sets of keys and strengths by their digests, and forget others; tells how many there are.

        Raises UnbindError where a key is not there.
        """
        for digest, strengths in added.items():
            missing = strengths.keys() - set(self.edits.bank.names)
            if missing:
                raise UnbindError(f"no module {', '.join(sorted(missing))} on rank {self.rank}")
            self.edits.sets[digest] = strengths
        for digest in removed:
            self.edits.sets.pop(digest, None)
        return len(self.edits.sets)

    def unbind_counts(self) -> dict[str, Any]:
        """By key and phase, positions evaluated and gates open on this rank's layers, and how near gates came."""
        return {"tells": self._tells, "counts": self.edits.bank.counts(), "looks": self.edits.bank.looks()}

    def unbind_check(self, passes: int) -> None:
        """Compare the gates' places with vLLM's own for so many passes."""
        self.edits.checks = passes

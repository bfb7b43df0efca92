"""How vLLM is started: its own flags, ours, and what of it goes with no module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import vllm
from pydantic import ValidationError
from vllm.config import CompilationConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from server.engine.vllm.edits import OPERATOR
from unbind_core.errors import UnbindError

VERSIONS = ("0.32.0",)  # whose insides the edits were tried with
MASKS = "server.engine.vllm.masks:GrammarMasks"
WORKER = "server.engine.vllm.worker.GatedWorker"
SCHEDULER, ASYNC_SCHEDULER = (
    f"server.engine.vllm.scheduler.{name}" for name in ("GatedScheduler", "GatedAsyncScheduler")
)
SETTINGS = {"model": "model", "dtype": "dtype", "max_model_len": "max_model_len", "max_num_seqs": "max_slots"}
OWN = {  # what this service says itself, by a setting or always
    *SETTINGS, "tokenizer", "worker_cls", "additional_config", "skip_tokenizer_init",
    "enable_prefix_caching", "generation_config", "max_logprobs", "runner",
    "logits_processors", "scheduler_cls", "logprobs_mode",
    "hf_overrides", "hf_config_path",  # another configuration than the one that the model is known by
}  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """How vLLM is to be started. ``columns``: int32 of gates' memory a position; ``others``: its own flags, KEY=VALUE or KEY;
    ``edits`` False: as it comes, to be compared with. ``layers``: behind which modules may stand; empty: all.
    """

    model: str
    dtype: str
    max_length: int
    slots: int
    columns: int
    device: str
    others: Sequence[str] = ()
    edits: bool = True
    looks: bool = True
    ends: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()

    def config(self) -> Any:
        """vLLM's configuration. Raises UnbindError naming the flag that it does not take, or that goes with no module."""
        version = vllm.__version__.split("+")[0]
        if version not in VERSIONS:
            raise UnbindError(
                f"vllm {version} is installed, and the engine was tried with {', '.join(VERSIONS)} alone; install that"
            )
        found = self._parsed()
        try:
            config = self._arguments(found).create_engine_config()
        except Exception as error:
            raise UnbindError(f"vllm_args: vLLM does not take them: {_told(error)}") from error
        self._require_own_numerics(config)
        parallel = config.parallel_config
        for unsafe, what in (
            (config.speculative_config, "speculative decoding"),
            (config.kv_transfer_config, "KV connectors"),
            (parallel.use_ubatching, "a batch in parts (dual-batch overlap)"),
            (
                max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
                "context parallelism",
            ),
            (config.cache_config.prefix_match_unit, "prefixes that end within a page (prefix-match-unit)"),
            (config.cache_config.kv_sharing_fast_prefill, "prompts of which layers compute a part (fast prefill)"),
            (config.model_config.runner_type != "generate", "pooling"),
            (config.diffusion_config, "diffusion"),
        ):
            if unsafe:
                raise UnbindError(
                    f"vllm_args: {what} was not tried with modules, which might then be left out; leave it away"
                )
        if self.edits:
            scheduling = config.scheduler_config
            scheduling.scheduler_cls = ASYNC_SCHEDULER if scheduling.async_scheduling else SCHEDULER
            cut(config.compilation_config)
        return config

    @staticmethod
    def _require_own_numerics(config: Any) -> None:
        """Modules are held to the numerics of the checkpoint as it lies there. Raises UnbindError where others were asked for."""
        model = config.model_config
        stored = getattr(model.hf_config, "quantization_config", None) or getattr(
            model.hf_text_config, "quantization_config", None
        )
        if model.quantization is not None and stored is None:
            raise UnbindError(
                f"vllm_args: quantization {model.quantization} makes other weights than modules are calibrated for while it loads "
                "them; serve a checkpoint that is quantised, and have the modules measured for it (unbind module verify --adopt)"
            )
        if (kept := config.cache_config.cache_dtype) not in ("auto", str(model.dtype).removeprefix("torch.")):
            raise UnbindError(
                f"vllm_args: kv-cache-dtype {kept} rounds keys and values more than modules are calibrated for; leave it away"
            )

    def _arguments(self, found: Any) -> AsyncEngineArgs:
        for name, value in (
            ("model", self.model),
            ("dtype", self.dtype),
            ("max_model_len", self.max_length),
            ("max_num_seqs", self.slots),
            *((("worker_cls", WORKER), ("logits_processors", [MASKS])) if self.edits else ()),
            (
                "additional_config",
                {
                    "unbind": {
                        "columns": self.columns,
                        "operator": 1,
                        "looks": self.looks,
                        "ends": list(self.ends),
                        "layers": list(self.layers),
                    }
                },
            ),
            ("skip_tokenizer_init", True),
            ("enable_prefix_caching", True),
            ("generation_config", "vllm"),
            ("max_logprobs", -1),
            ("logprobs_mode", "raw_logprobs"),
        ):
            setattr(found, name, value)
        return AsyncEngineArgs.from_cli_args(found)

    def _parsed(self) -> Any:
        flags = []
        for other in self.others:
            key, equals, value = other.partition("=")
            name = key.strip().lstrip("-").replace("_", "-")
            field = name.removeprefix("no-").replace("-", "_")
            if field in OWN:
                remedy = f"use the setting {SETTINGS[field]}" if field in SETTINGS else "leave it away"
                raise UnbindError(f"vllm_args: '{name}' is what this server says itself; {remedy}")
            flags.append(f"--{name}{equals}{value}")
        if self.device == "cpu" and not any(
            flag.startswith(("--enforce-eager", "--no-enforce-eager", "--compil")) for flag in flags
        ):
            flags.append("--enforce-eager")
        # Without abbreviations: one would pass for a flag that this server says itself, or end in a page on how to call vLLM
        parser = AsyncEngineArgs.add_cli_args(
            FlexibleArgumentParser(exit_on_error=False, allow_abbrev=False, add_help=False)
        )
        try:
            found, unknown = parser.parse_known_args(flags)
        except (Exception, SystemExit) as error:
            raise UnbindError(f"vllm_args: vLLM does not take {' '.join(flags)}: {error}") from error
        if unknown:
            raise UnbindError(f"vllm_args: vLLM has no {' '.join(unknown)}; see `vllm serve --help`")
        return found


def _told(error: Exception) -> str:
    """What is wrong, in one line; of several things that pydantic found each."""
    if isinstance(error, ValidationError):
        return "; ".join(": ".join([*map(str, one["loc"]), one["msg"]]) for one in error.errors())
    return " ".join(str(error).split())


def cut(compilation: CompilationConfig) -> None:
    """Have what is compiled cut where modules stand, and so the graphs of pieces. Those of whole steps are cut while they are
    captured, see ``graphs.py``.
    """
    if compilation.splitting_ops is not None and OPERATOR not in compilation.splitting_ops:
        compilation.splitting_ops = [*compilation.splitting_ops, OPERATOR]

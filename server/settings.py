"""One frozen, strictly parsed settings object, which every process of the service has; ``sources.py`` reads it."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from server.rules import ProfileName, Rules, Strengths, WhenOpen, from_json, parts

PREFIX = "UNBIND_"
# Shown nowhere, and given to no process that has no use for them.
SECRETS = frozenset({"admin_key", "guard_key", "private_key", "upstream_key"})
FROM_FILES = SECRETS | {"database_url"}  # what a file named by ``NAME_file`` may hold, such as a mounted secret
GUARD_KEY_BYTES = 32
HERE = Path(__file__).resolve().parent
DEMO = HERE / "demo"


def _key(text: str) -> str:
    if text and not (len(text) == 2 * GUARD_KEY_BYTES and set(text) <= set(string.hexdigits)):
        raise ValueError(
            f"must be {2 * GUARD_KEY_BYTES} hexadecimal digits, such as `openssl rand -hex {GUARD_KEY_BYTES}` gives"
        )
    return text


def _private_keys(text: str, known: ValidationInfo) -> str:
    for key in parts(text):
        _key(key)
    if text and not known.data.get("private_store"):
        raise ValueError(
            "is for files in private_store: set that as well; what is in data_dir is left to an encrypted disk"
        )
    return text


class Settings(BaseModel):
    """Every setting. Keys are the same in the file, in the environment (UNBIND_ and upper case) and as flags."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    model: Annotated[Path, Field(description="folder of the checkpoint to serve")] = DEMO / "base"
    reference: Annotated[Path | None, Field(description="checkpoint or adapter that fits lead towards")] = None
    adapter: Annotated[Path | None, Field(description="folder of a LoRA adapter on it; the demo model has its own")] = (
        None
    )
    model_name: Annotated[str, Field(description="name in /v1/models; the checkpoint folder's name where empty")] = ""
    modules_dir: Annotated[Path | None, Field(description="modules that ship, for the demo")] = HERE.parent / "modules"
    data_dir: Annotated[Path, Field(description="database, keys, job files and published modules")] = Path(".unbind")
    retain: Annotated[Path, Field(description="JSONL of retain rows for fitting")] = (
        DEMO / "rows" / "retain_train.jsonl"
    )
    retain_calibration: Annotated[
        Path | None,
        Field(description="JSONL of retain rows unseen in training: half choose, half certify; else a fifth of retain"),
    ] = DEMO / "rows" / "retain_calibration.jsonl"
    retain_test: Annotated[Path | None, Field(description="JSONL of retain rows for the before/after table")] = (
        DEMO / "rows" / "retain_test.jsonl"
    )
    retain_test_limit: Annotated[int, Field(ge=0, description="how many of them a takedown's verification reads")] = 60
    upstream: Annotated[str, Field(description="address of the server that `unbind guard` stands in front of")] = ""
    upstream_key: Annotated[str, Field(description="key that `unbind guard` gives it", repr=False)] = ""
    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port to listen on")] = 8000
    metrics_port: Annotated[
        int | None,
        Field(ge=0, le=65535, description="port of its own for /metrics, which wants no key there; 0: any free one"),
    ] = None
    metrics_host: Annotated[str, Field(description="address that metrics_port listens on")] = "127.0.0.1"
    metrics_interval: Annotated[
        float, Field(gt=0, le=3600, description="seconds between two readings of the gates that /metrics shows")
    ] = 15.0
    metrics_detail: Annotated[bool, Field(description="histograms of scores, times and lengths too")] = True
    metrics_vllm_names: Annotated[bool, Field(description="show figures under vLLM's names too")] = False
    worker_metrics_port: Annotated[int | None, Field(ge=0, le=65535, description="port of a worker's metrics")] = None
    canary_seconds: Annotated[float, Field(ge=0, le=86_400, description="seconds between canaries; 0: none run")] = 0.0
    ready_needs_canary: Annotated[bool, Field(description="not ready while an enforced module's canary misses")] = False
    admin_key: Annotated[
        str, Field(description="key of /admin/v1; made and kept in data_dir where empty", repr=False)
    ] = ""
    guard_key: Annotated[
        str,
        AfterValidator(_key),
        Field(
            description="hexadecimal key that guards are made with, the same on every server; else in data_dir",
            repr=False,
        ),
    ] = ""
    device: Annotated[str, Field(description="torch device")] = "cpu"
    dtype: Annotated[Literal["float32", "bfloat16", "float64"], Field(description="precision the model runs in")] = (
        "float32"
    )
    engine: Annotated[
        Literal["embedded", "vllm"], Field(description="what computes the answers; vllm needs the extra of that name")
    ] = "embedded"
    vllm_args: Annotated[
        tuple[str, ...],
        BeforeValidator(parts),
        Field(description="vLLM's own flags, KEY=VALUE or KEY, with commas between"),
    ] = ()
    gate_columns: Annotated[
        int,
        Field(ge=2, description="numbers of 4 bytes that vLLM keeps a position for gates: heads and one a module"),
    ] = 256
    gate_layers: Annotated[
        tuple[int, ...],
        BeforeValidator(parts),
        Field(description="decoder layers where modules may stand under vLLM, as in 20,-1; none: all"),
    ] = ()
    max_slots: Annotated[
        int, Field(ge=0, le=1024, description="requests that run at the same time; 0: as free memory allows")
    ] = 0
    max_model_len: Annotated[
        int, Field(ge=0, description="prompt and answer tokens of one request; 0: as model and free memory allow")
    ] = 0
    chunk_tokens: Annotated[
        int, Field(ge=1, description="prompt tokens computed in one step, of all requests together")
    ] = 512
    queue_limit: Annotated[int, Field(ge=0, description="requests that wait before 429; of a key 3/4 of them")] = 64
    drain_timeout: Annotated[
        float, Field(ge=0, le=3600, description="seconds that running requests get to end when the server is stopped")
    ] = 30.0
    max_body_bytes: Annotated[
        int, Field(ge=1024, description="largest body of a request to /admin/v1, uploads among them, before 413")
    ] = 16 * 1024 * 1024
    max_inference_bytes: Annotated[
        int,
        Field(ge=1024, description="largest body of any other request before 413; max_body_bytes where that is less"),
    ] = 4 * 1024 * 1024
    body_timeout: Annotated[float, Field(gt=0, description="seconds in which a body must arrive before 408")] = 60.0
    max_header_bytes: Annotated[
        int, Field(ge=1024, description="largest head of a request, address and headers, before 431")
    ] = 32 * 1024
    max_headers: Annotated[int, Field(ge=16, description="most headers of a request before 431")] = 100
    header_timeout: Annotated[
        float, Field(gt=0, description="seconds in which a request's head must arrive before 408")
    ] = 10.0
    keep_alive_timeout: Annotated[
        int, Field(ge=1, description="seconds after which a connection that asks nothing is closed")
    ] = 30
    max_connections: Annotated[
        int, Field(ge=1, description="connections before 503; those over twice as many are closed at once")
    ] = 800
    threads: Annotated[
        int, Field(ge=0, description="torch threads of the server; 0: as torch chooses and control groups allow")
    ] = 0
    worker: Annotated[bool, Field(description="run a takedown worker beside the server")] = True
    worker_device: Annotated[
        str, Field(description="torch device that takedowns are fitted on; that of device where empty")
    ] = ""
    worker_threads: Annotated[
        int, Field(ge=1, description="torch threads of the worker, where there are cores for them")
    ] = 2
    prepare: Annotated[bool, Field(description="have idle workers compute what takedowns need of the retain rows")] = (
        True
    )
    verify_attempts: Annotated[
        int, Field(ge=0, le=20, description="completions a row and access condition in verification; 0: one, plain")
    ] = 0
    worker_nice: Annotated[int, Field(ge=0, le=19, description="how far the worker steps back from the server")] = 10
    lease_seconds: Annotated[
        float, Field(gt=0, description="a job whose worker is silent this long is taken up again")
    ] = 15.0
    hang_seconds: Annotated[
        float,
        Field(gt=0, description="a worker, or its process for a job, that gives no sign of life this long is killed"),
    ] = 60.0
    max_attempts: Annotated[int, Field(ge=1, description="workers that may die on a job before it is failed")] = 3
    database_url: Annotated[
        str,
        Field(description="registry: sqlite:///FILE or postgresql+psycopg://...; in data_dir where empty", repr=False),
    ] = ""
    module_store: Annotated[
        str, Field(description="where published modules are kept: folder or fsspec URL; in data_dir where empty")
    ] = ""
    private_store: Annotated[
        str,
        Field(description="where forget rows and checkpoints are kept: folder or fsspec URL; in data_dir where empty"),
    ] = ""
    private_key: Annotated[
        str,
        AfterValidator(_private_keys),
        Field(
            description="hexadecimal key that files in private_store are encrypted with; older keys after it, with commas",
            repr=False,
        ),
    ] = ""
    audit_head: Annotated[
        Path | None,
        Field(description="file that remembers the audit trail's end; best on another disk; else in data_dir"),
    ] = None
    audit_check_seconds: Annotated[
        float,
        Field(ge=0, description="seconds between checks of the whole audit trail; 0: only when the server starts"),
    ] = 3600.0
    audit_log: Annotated[
        str, Field(description="file that gets a JSON line for each row of the audit trail; - for standard output")
    ] = ""
    otel_endpoint: Annotated[
        str,
        Field(
            pattern=r"^(https?://\S+)?$",
            description="OTLP/HTTP address for traces and audit rows, http://HOST:4318; needs the extra otel",
        ),
    ] = ""
    forget_retention_days: Annotated[
        float, Field(ge=0, description="forget rows are deleted so long after their takedown; 0 keeps them")
    ] = 0.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Field(description="least severe log line")] = (
        "info"
    )
    log_format: Annotated[Literal["text", "json"], Field(description="log lines for people, or a JSON object each")] = (
        "text"
    )
    insecure: Annotated[bool, Field(description="listen beyond loopback although no key exists")] = False
    enforced: Annotated[Strengths, Field(description="modules that apply to every request, with their strengths")] = {}
    when_open: Annotated[WhenOpen, Field(description="log-probabilities and steering while a gate is open")] = "strip"
    profiles: Annotated[
        dict[ProfileName, Rules],
        BeforeValidator(from_json),
        Field(description="named sets of modules, as the admin API takes them"),
    ] = {}
    fim_template: Annotated[
        str,
        Field(description="fill-in-the-middle order: <PRE>{prefix}<SUF>{suffix}<MID>; the tokenizer's where empty"),
    ] = ""
    tool_format: Annotated[
        Literal["", "hermes", "llama", "mistral", "mistral-named", "deepseek", "deepseek-named", "none"],
        Field(description="how the model writes calls of functions; as its chat template says where empty"),
    ] = ""
    cors_origins: Annotated[
        tuple[str, ...],
        BeforeValidator(parts),
        Field(description="origins whose pages may ask, with commas between; * for any"),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        BeforeValidator(parts),
        Field(description="names in Host, beside loopback's, that a server on loopback without keys answers to"),
    ] = ()
    request_timeout: Annotated[float, Field(gt=0, description="seconds until a request is given up with 504")] = 600.0

    @model_validator(mode="before")
    @classmethod
    def _demo_belongs_together(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The demo checkpoint comes with adapter, reference and modules, its retain rows with calibration rows; one's own alone."""
        if "model" not in values and "adapter" not in values:
            values = {"reference": DEMO / "reference"} | values | {"adapter": DEMO / "adapter"}
        if "retain" in values and "retain_calibration" not in values:
            values = values | {"retain_calibration": None}
        served = {Path(str(values[key])).resolve() for key in ("model", "adapter") if values.get(key)}
        if "modules_dir" not in values and served - {DEMO / "base"} != {DEMO / "adapter"}:
            values = values | {"modules_dir": None}
        return values

    @model_validator(mode="after")
    def _canaries_run(self) -> Self:
        if self.ready_needs_canary and not self.canary_seconds:
            raise ValueError("ready_needs_canary: no canaries are run; set canary_seconds as well")
        return self

    @property
    def is_demo(self) -> bool:
        """Whether the demo world is served, whose rows may be shown to anybody."""
        return self.model == DEMO / "base"

    @property
    def served_name(self) -> str:
        """The name in /v1/models."""
        return self.model_name or ("unbind-demo" if self.is_demo else self.model.resolve().name)

    @property
    def fitting_device(self) -> str:
        """The torch device of the worker's fits."""
        return self.worker_device or self.device

    @property
    def published_store(self) -> str:
        """Where the worker publishes modules: a folder or an fsspec URL."""
        return self.module_store or str(self.data_dir / "modules")

    @property
    def private_keys(self) -> list[bytes]:
        """What files in ``private_store`` are sealed with, the newest first; none where they lie open."""
        return [bytes.fromhex(key) for key in parts(self.private_key)]

    @property
    def database_address(self) -> str | Path:
        """The registry's address for SQLAlchemy, or the SQLite file: a path may hold what means something else in an address."""
        return self.database_url or self.data_dir / "unbind.sqlite"

    @property
    def audit_head_file(self) -> Path:
        """The file that remembers where the audit trail ends."""
        return self.audit_head or self.data_dir / "audit.head"

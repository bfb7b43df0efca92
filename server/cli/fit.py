"""``unbind fit``: make a module."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from server import demo
from server.cli.console import AsJson, clear_errors, numbers, progress_bars, require_target, screen, write_json
from server.cli.models import Device, FimTemplate, Model, dtype_of, forget_rows, load, retain_rows
from unbind_core.errors import UnbindError
from unbind_core.files import write_text

if TYPE_CHECKING:
    from unbind_core import FitReport, UnbindModule
    from unbind_core.fitting.calibration import Budgets
    from unbind_core.fitting.corrections.reference import Reference

Adapter = Annotated[Path | None, typer.Option(help="LoRA adapter folder (peft) on the model.")]
Dtype = Annotated[
    str,
    typer.Option(help="float32, bfloat16 or float64, the one that the service runs in; float16 for `attach` alone."),
]


def _budgets(gate: str, kl: float | None, nll: float | None, bleu: float | None) -> Budgets | None:
    from unbind_core.fitting.options import BUDGETS

    given = {name: value for name, value in (("kl", kl), ("nll", nll), ("bleu", bleu)) if value is not None}
    return replace(BUDGETS[gate], **given) if given and gate in BUDGETS else None


def fit(
    forget: Annotated[Path, typer.Option(help='JSONL: {"prompt", "continuation"} or {"text"} a line.')],
    out: Annotated[Path, typer.Option(help="Module file to write, NAME.safetensors.")],
    model: Model = None,
    adapter: Adapter = None,
    retain: Annotated[
        Path | None, typer.Option(help='JSONL: {"text"} a line; the demo rows where none is given.')
    ] = None,
    retain_calibration: Annotated[
        Path | None,
        typer.Option(
            help="Retain rows the model was not trained on: half choose, half certify; else a fifth of --retain."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Module name; the file's name where none is given.")] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Decoder layers to try, from 0, as in 2,3,4; all where none is given. Of the paper's gates: auto has its own."
        ),
    ] = None,
    forms: Annotated[
        str | None, typer.Option(help="plain, fim or plain,fim; all the tokenizer has where none is given.")
    ] = None,
    fim_template: FimTemplate = "",
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the partitions.")] = 0,
    gate: Annotated[
        str,
        typer.Option(
            help="auto: a gate that opens early and anywhere, and a learned correction; paper: the paper's gate and push over "
            "finer grids and more rows; paper-strict: as published, and nothing else."
        ),
    ] = "auto",
    policy: Annotated[
        str | None,
        typer.Option(help="rewrite: other code is written; silent: the answer ends. rewrite with gate auto."),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            help="What to lead towards: a checkpoint, or an adapter on the model, trained without the rows. Else the model "
            "without its adapter; else itself, by the last few tokens of a text alone."
        ),
    ] = None,
    quantiles: Annotated[
        str | None, typer.Option(help="Gate quantiles to try, as in 0.9,0.95 (the paper's gates).")
    ] = None,
    kl_budget: Annotated[
        float | None,
        typer.Option(
            help="Mean KL(original || edited) allowed on retain rows, nats; the gate's own where none is given."
        ),
    ] = None,
    nll_budget: Annotated[
        float | None,
        typer.Option(help="Mean rise of the NLL allowed on retain rows, nats; the gate's own where none is given."),
    ] = None,
    bleu_budget: Annotated[
        float | None, typer.Option(help="Fall of retain BLEU allowed, absolute; the gate's own where none is given.")
    ] = None,
    full_scan: Annotated[
        bool, typer.Option(help="Measure every candidate's retain cost, for the report alone (the paper's gates).")
    ] = False,
    beside: Annotated[
        int,
        typer.Option(
            min=0,
            help="How many other modules are on with it; beside any, a gate of auto opens as late as its rows allow.",
        ),
    ] = 0,
    effort: Annotated[
        float, typer.Option(help="Share of the training steps; below 1 for a quick look. Of gate auto.")
    ] = 1.0,
    report: Annotated[Path | None, typer.Option(help="Where to write the fit report (JSON).")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder for retain statistics, reused by the next fit.")] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Fit and calibrate a module that makes the model forget the given rows."""
    from unbind_core import FitOptions
    from unbind_core import fit as fit_module
    from unbind_core.fitting.calibration import QUANTILES
    from unbind_core.fitting.fit import drawn
    from unbind_core.module_checks import name_problem

    with clear_errors():
        if retain is None and model is not None:
            raise UnbindError("--retain is needed with --model: rows of code that must stay as they are (JSONL)")
        called = name or out.name.removesuffix(".safetensors")
        if problem := name_problem(called):
            raise UnbindError(f"--name: '{called}' {problem}")
        if reference is not None and gate in ("paper", "paper-strict"):
            raise UnbindError(f"--reference: gate '{gate}' leads towards nothing; leave it out, or use --gate auto")
        require_target("--out", out)
        if report is not None:
            require_target("--report", report)
        if retain is None:
            retain, retain_calibration = demo.RETAIN_TRAIN, retain_calibration or demo.RETAIN_CALIBRATION
        # before the model, which may take minutes to load
        forget_set, retain_set = forget_rows(forget), retain_rows(retain)
        held = retain_rows(retain_calibration, "--retain-calibration") if retain_calibration else ()
        options = FitOptions(
            layers=numbers(layers, int, "--layers", "2,3,4"),
            forms=tuple(forms.split(",")) if forms else None,
            seed=seed,
            quantiles=numbers(quantiles, float, "--quantiles", "0.9,0.95") or QUANTILES,
            full_scan=full_scan,
            gate=gate,
            policy=policy,
            budgets=_budgets(gate, kl_budget, nll_budget, bleu_budget),
            beside=beside,
            effort=effort,
        )
        drawn(forget_set, retain_set, held, options)  # refuses what no fit takes
        loaded = load(model, adapter, dtype, device, fim_template)
        with progress_bars(as_json) as progress:
            module, result = fit_module(
                loaded.model,
                loaded.tokenizer,
                forget_set,
                retain_set,
                retain_calibration=held,
                name=called,
                identity=loaded.identity,
                options=options,
                progress=progress,
                cache=cache,
                reference=_reference(model, adapter, reference, dtype, device) if gate == "auto" else None,
            )
        effective = result.outcome != "ineffective"
        # before the report: nothing may come between a fit and its module
        digest = module.save(out) if effective else ""
        if report is not None:
            write_text(report, json.dumps(result.to_json(), indent=1))
        if not effective:
            raise UnbindError(
                "ineffective: nothing forgot anything within the retain budgets, so no module was written; "
                "--report FILE shows what each candidate reached"
            )
        if as_json:
            write_json({"path": str(out), "digest": digest, **result.to_json()})
            return
        for line in _summary(module, result):
            screen.print(line)
        screen.print(f"{sum(result.seconds.values()):.0f} s; written to {out} ({digest[:12]})")


def _reference(model: Path | None, adapter: Path | None, named: Path | None, dtype: str, device: str) -> Reference:
    from unbind_core import load_reference

    if model is None:
        adapter, named = adapter or demo.ADAPTER, named or demo.REFERENCE
    return load_reference(model or demo.BASE, adapter, named=named, dtype=dtype_of(dtype), device=device)


def _tokens(count: int | None) -> str:
    return "all it has" if count is None else f"{count} tokens"


def _summary(module: UnbindModule, result: FitReport) -> list[str | Text]:
    """What was chosen and what it was measured to do, in a few lines."""
    from unbind_core.evaluation.bounds import told

    chosen = result.selected or {}
    correction = f"a correction of {module.rank} units" if module.rank else "a push"
    where = f"{module.name}: {module.policy}, {correction} at layer {module.layer}, kappa {module.kappa:.3g}, tau {module.tau:.4g}"
    certificate = [f"certificate: {told(result.certificate)}"] if result.certificate else []
    if module.detector == "fisher":
        return [
            Text.assemble(
                (result.outcome, "bold green"),
                f" {where}, the paper's gate at quantile {module.quantile} ({chosen['grid']} grid)",
            ),
            f"forget NLL +{chosen['forget_gain']:.3f}, retain KL {chosen['retain_kl']:.4f}, retain NLL "
            f"{chosen['retain_nll_increase']:+.4f}, retain BLEU {-chosen['retain_bleu_drop']:+.4f}, "
            f"gates open on {100 * chosen['retain_open_rate']:.2f} % of retain positions and "
            f"{100 * chosen['forget_open_rate']:.0f} % of those of the rows",
            *certificate,
        ]
    forgot, cost = chosen["forgot"], chosen["cost"]
    left = ", ".join(f"{form} {value:.3f}" for form, value in forgot["f_bleu"].items())
    opens = chosen["opens"]
    lines: list[str | Text] = [
        Text.assemble(
            (result.outcome, "bold green"),
            f" {where}, a network of {len(module.network[0])} with {len(module.network[2])} heads "
            f"over {module.window} positions",
        ),
        f"F-BLEU left: {left}; rows with 50 exact tokens {forgot['spans']}, mean recovery {100 * forgot['recovery']:.1f} %, "
        f"empty answers {100 * forgot['empty']:.0f} %; towards {chosen['correction']['reference']['kind']}",
        f"before its gate opens a row has given {_tokens(opens['median'])} (median), 95 % of them {_tokens(opens['p95'])}; "
        f"it is open on {100 * chosen['forget_open_rate']:.0f} % of their positions",
        f"on the rows that chose it: retain NLL {cost['nll']:+.4f} (cautiously {cost['cautious']['nll']:+.4f}), "
        f"KL {cost['kl']:.4f}, gates open on {100 * cost['open_rate']:.3f} % of positions "
        f"(cautiously {100 * cost['cautious']['open_rate']:.3f} %)",
        *certificate,
    ]
    if left_out := len(result.retain_rows_left_out):
        lines.append(
            Text.assemble(
                (f"{left_out} retain rows repeat 50 tokens or more of a forget row and were left out:", "yellow"),
                " they cannot be kept and forgotten too; --report FILE numbers them",
            )
        )
    if alike := len(result.retain_rows_alike):
        lines.append(
            Text.assemble(
                (
                    f"{alike} retain rows are so like a forget row that gates which spare them opened late or never:",
                    "yellow",
                ),
                " the detector has learned them too, which keeps those as they are, but not other code that is as much alike; "
                "--report FILE numbers them",
            )
        )
    if result.outcome == "short":
        lines.append(
            Text(
                f"It stays within the budgets and misses its aim: {', '.join(chosen['missed'])}; --report FILE shows what was "
                "tried.",
                "yellow",
            )
        )
    return lines


def register(app: typer.Typer) -> None:
    """Add the command to ``unbind``."""
    app.command()(fit)

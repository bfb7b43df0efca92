"""Rows -> calibrated module + report: the one entrance to fitting.

Checks what is given, draws the partitions, makes sure that gradients are exact on this model, and hands over to the paper's gate
(``paper.py``) or to the choice among gates (``auto.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from unbind_core.architecture import decoder_layers, identify
from unbind_core.cpu.linears import packed_linears
from unbind_core.encoding import available_forms, marks, pad_id
from unbind_core.errors import DataError
from unbind_core.evaluation.completions import retain_prompts, unedited_completions
from unbind_core.evaluation.scores import RowScore, require_known_rows
from unbind_core.fitting.auto import fit_auto
from unbind_core.fitting.certificate import certificate_rows, certificate_states, certify
from unbind_core.fitting.context import Context
from unbind_core.fitting.corrections.leading import leading, led
from unbind_core.fitting.corrections.nearsighted import near_by
from unbind_core.fitting.corrections.reference import Kind, Reference
from unbind_core.fitting.options import GATES, PAPER_GATES, Clock, FitOptions, FitReport, Outcome, possible_layers
from unbind_core.fitting.paper import fit_paper
from unbind_core.fitting.retained import retained
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule
from unbind_core.module_checks import name_problem
from unbind_core.progress import ProgressCallback, silent
from unbind_core.rows import ForgetRow, Partitions, RetainRow, make_partitions
from unbind_core.running.capture import check_exactness
from unbind_core.running.compiled import uncompiled
from unbind_core.running.gradients import require_gradients
from unbind_core.running.recording import kept_tensors
from unbind_core.windows import window_limit

RETAIN_LIMIT = 2500  # fitting and calibration together: all of a set of 2,000


def drawn(
    forget: Sequence[ForgetRow],
    retain: Sequence[RetainRow],
    retain_calibration: Sequence[RetainRow] = (),
    options: FitOptions | None = None,
) -> tuple[list[RetainRow], Partitions]:
    """The retain rows of a fit with these arguments, in one list, and which rows have which role in it.

    Needs no model: who has one to load asks here before that. Raises DataError and InsufficientRows as :func:`fit` would.
    """
    options = options or FitOptions()
    _check_options(options)
    options, strict = options.settled(), options.gate == "paper-strict"
    if strict:
        retain_calibration = ()  # the paper takes all of its retain rows from those the model was trained on
    rows = [*retain, *retain_calibration]
    parts = make_partitions(
        forget,
        rows,
        options.seed,
        options.retain_limit or RETAIN_LIMIT,
        len(retain_calibration),
        split_forget=options.gate in PAPER_GATES,
        certify=not strict,
    )
    return rows, parts


def _check_options(options: FitOptions) -> None:
    if options.gate not in GATES:
        raise DataError(f"gate: '{options.gate}' is unknown; choose from {', '.join(GATES)}")
    if options.layers is not None and not options.layers:
        raise DataError("layers: the list is empty; leave it out to try every layer")
    if not options.effort > 0:
        raise DataError(f"effort: {options.effort} is not above 0; 1 is the usual one, 0.1 a quick look")
    for name, most in asdict(options.limits).items():
        if math.isnan(most) or (most < 0 and name in ("kl", "open_rate")):  # the others may fall
            raise DataError(f"budgets.{name}: {most} is met by no module; give 0 or more")
    if any(not 0 <= q <= 1 for q in options.quantiles) or not options.quantiles:
        raise DataError("quantiles: give at least one value between 0 and 1")
    if any(kappa < 0 for kappa in (*options.strengths, *options.norm_strengths)):
        raise DataError("strengths: must not be negative; the direction's sign is chosen by calibration")


def _layers(options: FitOptions, layer_count: int) -> list[int]:
    possible = possible_layers(options.gate, layer_count)
    layers = possible if options.layers is None else sorted(set(options.layers))
    for layer in layers:
        if not 0 <= layer < layer_count:
            raise DataError(f"layers: {layer} does not exist; the model has decoder layers 0 to {layer_count - 1}")
        if layer not in possible:
            raise DataError(
                f"layers: gate '{options.gate}' does not stand at layer {layer} of {layer_count}, but at "
                f"{', '.join(map(str, possible))}; leave layers out"
            )
    return layers


@uncompiled()
def fit(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[ForgetRow],
    retain: Sequence[RetainRow],
    *,
    name: str,
    retain_calibration: Sequence[RetainRow] = (),
    identity: ModelIdentity | None = None,
    options: FitOptions | None = None,
    progress: ProgressCallback = silent,
    cache: Path | None = None,
    before: Sequence[RowScore] | None = None,
    reference: Reference | None = None,
) -> tuple[UnbindModule, FitReport]:
    """Fit and calibrate one module that makes ``model`` forget the continuations of ``forget``; ``options.gate`` says how.

    ``retain_calibration``: rows for the retain budgets that the model was not trained on, which makes honester rates;
    without them a fifth of ``retain`` is set aside. Half of them choose, the other half certifies: what the module costs rows that
    chose nothing is ``report.certificate``. Partitions count them after ``retain``. ``identity`` (from
    :func:`unbind_core.load_model`) is computed if not given; give it where adapters were merged. ``cache`` is a folder for
    what does not depend on the forget set; ``before``: what ``forget_scores(..., attempts=0)`` gave for these rows and the
    unedited model in all forms, where that is known. ``reference``: what a learned correction leads towards (``reference.py``);
    None: the model itself. The model is left as it was. Raises DataError, InsufficientRows, FittingError,
    UnsupportedArchitecture, and Cancelled where the callback raises it.

    With outcome "ineffective" the module has kappa = 0 and changes nothing: do not deploy it. With "short" it forgets less than
    was aimed at. The paper's gates keep rows of the forget set back for calibration and validation, as the paper does, and
    "paper-strict" takes its 600 retain rows, all of ``retain``, as 480 and 120 without a certificate;
    ``gate="auto"`` fits all of them and needs no more than one.
    """
    if problem := name_problem(name):
        raise DataError(f"name: '{name}' {problem}")
    if before is not None and len(before) != len(forget):
        raise DataError(
            f"before: {len(before)} scores were given for {len(forget)} forget rows; give one a row, in their order"
        )
    require_known_rows(model, tokenizer, forget, (*retain, *retain_calibration))
    context = context_of(model, tokenizer, forget, retain, retain_calibration, name, identity, options, progress, cache)
    with context.clock.stage("self-check"):
        kept_tensors(model)  # gates that remember know no other memory of a text
        require_gradients(model, context.layers)
        first = context.forget_windows(context.parts.forget_fit[:1])[0]
        context = replace(context, before=before, exactness=check_exactness(model, first, context.layers))
    other = reference.model if reference is not None else None
    with packed_linears(model), packed_linears(other) if other is not None else nullcontext():
        if context.options.gate in PAPER_GATES:
            module, report = fit_paper(context)
        else:
            reference = replace(reference or Reference(), unsaid=marks(tokenizer))
            with led(context, reference) as towards:
                module, report = fit_auto(context, towards)
        if report.outcome is Outcome.INEFFECTIVE:
            return module, report  # it changes nothing, and is not to be deployed
        certificate = certify(context, module, report.retain_rows_left_out)
    if certificate is None:
        return module, report
    return (
        replace(module, measured={**module.measured, "certificate": certificate}),
        replace(report, certificate=certificate),
    )


@uncompiled()
def prepare_retained(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    retain: Sequence[RetainRow],
    *,
    cache: Path,
    retain_calibration: Sequence[RetainRow] = (),
    held_out: Sequence[RetainRow] = (),
    identity: ModelIdentity | None = None,
    reference: Reference | None = None,
    options: FitOptions | None = None,
    progress: ProgressCallback = silent,
) -> dict[str, float]:
    """Fill ``cache`` with what the next :func:`fit` with ``gate="auto"`` on these retain rows takes from it; seconds by part.

    Arguments as there; ``held_out`` are the rows of the verification after it, and come last. It serves forget sets of any
    size, and ``reference`` need have no model where it is named, as nothing is prepared for that. Each part is kept once it is
    whole, so that what was interrupted goes on after the last one.
    """
    stand_in = [ForgetRow("a", "b")]  # the draw of retain rows does not depend on the forget set
    context = context_of(model, tokenizer, stand_in, retain, retain_calibration, "", identity, options, progress, cache)
    with packed_linears(model):
        _prepare(context, held_out, reference or Reference())
    return context.clock.seconds


def _prepare(context: Context, held_out: Sequence[RetainRow], reference: Reference) -> None:
    if reference.kind is Kind.ITSELF:
        reference = replace(reference, near=near_by(context))
    leading(context, reference)
    retained(context)
    with context.clock.stage("certificate"):
        if rows := certificate_rows(context):
            certificate_states(context, rows, context.layers[0])
    with context.clock.stage("held-out completions"):
        prompts, _ = retain_prompts(context.tokenizer, held_out, range(len(held_out)), window_limit(context.model))
        if prompts:
            unedited_completions(
                context.model,
                context.tokenizer,
                prompts,
                cache=context.cache,
                fingerprint=context.identity.fingerprint,
                progress=context.progress,
            )


def context_of(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[ForgetRow],
    retain: Sequence[RetainRow],
    retain_calibration: Sequence[RetainRow],
    name: str,
    identity: ModelIdentity | None,
    options: FitOptions | None,
    progress: ProgressCallback,
    cache: Path | None,
) -> Context:
    """What a fit with these arguments begins with. Raises as :func:`fit` does."""
    options = options or FitOptions()
    rows, parts = drawn(forget, retain, retain_calibration, options)
    layers, options = _layers(options, len(decoder_layers(model))), options.settled()
    options = replace(options, max_window=window_limit(model, options.max_window))
    context = Context(
        model=model,
        tokenizer=tokenizer,
        identity=identity or identify(model, tokenizer),
        name=name,
        forget=forget,
        retain=rows,
        parts=parts,
        layers=layers,
        forms=available_forms(tokenizer, options.forms),
        pad=pad_id(tokenizer),
        options=options,
        progress=progress,
        cache=cache,
        clock=Clock(next(model.parameters()).device),
        exactness=0.0,
    )
    context.require_windows()
    return context


__all__ = ["FitOptions", "FitReport", "fit", "prepare_retained"]

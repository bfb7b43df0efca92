"""A decode step's edit at one layer in two kernels: what gates decide, and what the open ones add.

Written in Triton, which every CUDA build of torch brings, and launched by ``decoding.py``. The arithmetic of gates is that of
``NetworkGates``, to the last bit; that of corrections is ``added`` in another order. No size but that of a state is part of what is
compiled, so that modules come and go, and batches grow, without a pause. Triton reads annotations as code, so there are none.
"""

import triton
import triton.language as tl

FIELDS = 10  # int32 of each module: first column, heads, window, first, least, hold, slot, first rank, ranks, whether in FP32
BINS = 12  # int64 of each module: scores by how many boundaries they reach, at most 10; and open gates
BOUNDS = 16  # boundaries, infinite beyond those there are
BLOCK = 512  # numbers of a state that one program corrects

_FIELDS, _BINS, _BOUNDS, _BLOCK = (tl.constexpr(one) for one in (FIELDS, BINS, BOUNDS, BLOCK))
_LANES = tl.constexpr(32)  # heads, or ranks, at a time
_LINES = tl.constexpr(8)  # ranks at a time, of those that are added to a state
_STATE = tl.constexpr(128)  # numbers of a state at a time, for the product with ranks
_SOME = tl.constexpr(64)  # modules at a time that are asked whether one of them acts
_LIMIT = tl.constexpr(2048.0)  # grains: a score counts for two thresholds at most
_GRAIN = tl.constexpr(1024.0)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: a small number and this is rounded to a whole one, halves to even
_LEAST = tl.constexpr(-2147483648)


@triton.jit
def _row(pages, size, paged, position):
    """The memory's row of a sequence's position, -1 being the one in front: see ``Addresses``."""
    inside = tl.maximum(position, 0)
    begin = tl.load(pages + inside // size).to(tl.int64) * size
    front = tl.where(paged != 0, begin - begin, begin)
    return tl.where(position < 0, front, begin + inside % size + 1)


@triton.jit
def _summed(scores, offsets, heads, here, before, behind, far):
    """Writes the running sums of heads, and gives the largest of those over the window and over the one that holds, in grains."""
    most = tl.full((), _LEAST, tl.int32)
    most_held = tl.full((), _LEAST, tl.int32)
    for begin in range(0, heads, _LANES):
        head = begin + tl.arange(0, _LANES)
        there = head < heads
        score = tl.load(scores + head, mask=there, other=0.0) + tl.load(offsets + head, mask=there, other=0.0)
        clipped = tl.minimum(tl.maximum(score, -_LIMIT), _LIMIT)
        grains = tl.where(tl.abs(score) >= 0.0, (clipped + _ROUND) - _ROUND, 0.0).to(tl.int32)  # else it is no number
        sums = grains + tl.load(before + head, mask=there, other=0)
        over_window = sums - tl.load(behind + head, mask=there, other=0)
        over_hold = sums - tl.load(far + head, mask=there, other=0)
        tl.store(here + head, sums, mask=there)
        most = tl.maximum(most, tl.max(tl.where(there, over_window, _LEAST), 0))
        most_held = tl.maximum(most_held, tl.max(tl.where(there, over_hold, _LEAST), 0))
    return most, most_held


@triton.jit
def _mean(grains, position, first, window, least):
    """The mean in thresholds of so many grains over a window up to a position; 0 where none counts."""
    seen = tl.minimum(position + 1 - first, window)
    mean = tl.div_rn(grains.to(tl.float32), tl.maximum(seen, least).to(tl.float32) * _GRAIN)
    return tl.where(seen > 0, mean, 0.0)


@triton.jit
def _numbers(address, single, places, there):
    """Numbers of a matrix at an address in memory, where devices have them: a multiple of 16. It has FP32 or else bfloat16."""
    if single != 0:
        full = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
        found = tl.load(full + places, mask=there, other=0.0)
    else:
        half = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16)
        found = tl.load(half + places, mask=there, other=0.0).to(tl.float32)
    return found


@triton.jit
def _within(state, d, into, single, edge, has_edge, ranks, rank, amount, out):
    """Writes amount max(A h + bias, least) of one module, whose factor is part of the amount."""
    for begin in range(0, rank, _LANES):
        lane = begin + tl.arange(0, _LANES)
        sums = tl.zeros((_LANES,), tl.float32)
        for at in range(0, d, _STATE):
            part = at + tl.arange(0, _STATE)
            values = tl.load(state + part, mask=part < d, other=0.0)
            there = (lane[:, None] < rank) & (part[None, :] < d)
            lines = _numbers(into, single, lane[:, None].to(tl.int64) * d + part[None, :], there)
            sums += tl.sum(lines * values[None, :], 1)
        if has_edge != 0:
            sums += tl.load(edge + lane, mask=lane < rank, other=0.0)
            least = tl.load(edge + ranks + lane, mask=lane < rank, other=0.0)
            sums = tl.where(sums < least, least, sums)  # what is no number stays so
        tl.store(out + lane, sums * amount, mask=lane < rank)


@triton.jit(
    do_not_specialize=[
        "count", "most", "first_module", "modules_in_all", "ranks", "by_row", "width", "ahead", "pages_width", "size", "paged",
        "has_counted", "has_requests", "opened_width", "has_edge",
    ],
    do_not_specialize_on_alignment=[
        "products", "offsets", "modules", "closes", "weights", "rows", "memory", "positions", "pages", "tally", "bounds", "counted",
        "requests", "opened", "hits", "matrices", "factors", "edge", "work",
    ],
)  # fmt: skip
def decide(
    products, offsets, count, most,
    modules, closes, first_module, modules_in_all, ranks,
    weights, rows, by_row,
    memory, width, positions, ahead, pages, pages_width, size, paged,
    tally, bounds, counted, has_counted,
    requests, has_requests, opened, opened_width, hits,
    states, matrices, factors, edge, has_edge, d, work,
):  # fmt: skip
    """One module at one state."""
    j = tl.program_id(0)
    n = tl.program_id(1)
    module = first_module + j
    own = modules + module * _FIELDS
    column = tl.load(own)
    heads = tl.load(own + 1)
    first = tl.load(own + 3)

    position = tl.load(positions + n).to(tl.int32) + ahead
    table = pages + n.to(tl.int64) * pages_width
    window = tl.load(own + 2)
    hold = tl.load(own + 5)
    lag = tl.minimum(position, tl.maximum(position - window, first - 1))
    far_lag = tl.minimum(position, tl.maximum(position - hold, first - 1))
    here = memory + _row(table, size, paged, position) * width + column
    before = memory + _row(table, size, paged, position - 1) * width + column
    behind = memory + _row(table, size, paged, lag) * width + column
    far = memory + _row(table, size, paged, far_lag) * width + column

    over_window, over_hold = _summed(
        products + (j.to(tl.int64) * count + n) * most, offsets + j * most, heads, here, before, behind, far
    )
    least = tl.load(own + 4)
    close = tl.load(closes + module)
    e = _mean(over_window, position, first, window, least)
    holding = _mean(over_hold, position, first, hold, least)
    was_open = tl.load(before + heads) > 0
    held = (e >= 1.0) | (was_open & ((e >= close) | (holding >= close)))
    e = tl.where(held & (e < close), holding, e)
    tl.store(here + heads, held.to(tl.int32))

    row = tl.zeros((), tl.int64)
    if by_row == 1:
        row = tl.load(rows + n).to(tl.int64)
    if by_row == 2:
        row = n.to(tl.int64)
    weight = tl.load(weights + row * modules_in_all + module)  # below 0 where the row does not ask for the module
    asked = weight >= 0.0
    gate = held & asked
    amount = tl.where(gate, tl.where(weight > 0.0, weight, -1.0), 0.0)
    out = work + n.to(tl.int64) * (2 * modules_in_all + ranks)
    tl.store(out + module, amount)
    tl.store(out + modules_in_all + ranks + module, e)

    if has_counted != 0:
        asked = asked & (tl.load(counted + n) != 0)
    reached = tl.sum((e >= tl.load(bounds + tl.arange(0, _BOUNDS))).to(tl.int32), 0)
    one = tl.full((), 1, tl.int64)
    tl.atomic_add(tally + module * _BINS + reached, one, mask=asked, sem="relaxed")
    counts = asked & gate
    tl.atomic_add(tally + module * _BINS + (_BINS - 1), one, mask=counts, sem="relaxed")
    if has_requests != 0:
        slot = tl.load(own + 6)
        known = opened + tl.load(requests + n) * opened_width + slot
        old = tl.atomic_xchg(known, tl.full((), 1, tl.int32), mask=counts, sem="relaxed")
        tl.atomic_add(hits + slot, one, mask=counts & (old == 0), sem="relaxed")

    if amount > 0.0:
        rank = tl.load(own + 8)
        start = tl.load(own + 7)
        state = states + n.to(tl.int64) * d
        out += modules_in_all + start
        amount *= tl.load(factors + module)
        into = tl.load(matrices + 2 * module)
        _within(state, d, into, tl.load(own + 9), edge + start, has_edge, ranks, rank, amount, out)


@triton.jit(
    do_not_specialize=["modules_in_all", "ranks", "in_place"],
    do_not_specialize_on_alignment=["work", "matrices", "constants", "modules"],
)
def correct(to, out, work, matrices, constants, modules, d, modules_in_all, ranks, in_place):
    """A part of one state."""
    n = tl.program_id(0).to(tl.int64)
    wide = tl.zeros((), tl.int64) + d
    part = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    there = part < d
    amounts = work + n * (2 * modules_in_all + ranks)
    sums = tl.zeros((_BLOCK,), tl.float32)
    acts = tl.zeros((), tl.int32)
    for begin in range(0, modules_in_all, _SOME):
        some = begin + tl.arange(0, _SOME)
        if tl.max(tl.load(amounts + some, mask=some < modules_in_all, other=0.0), 0) > 0.0:
            acts = tl.full((), 1, tl.int32)
            for module in range(begin, tl.minimum(begin + _SOME, modules_in_all)):
                amount = tl.load(amounts + module)
                if amount > 0.0:
                    sums += amount * tl.load(constants + module * wide + part, mask=there, other=0.0)
                    own = modules + module * _FIELDS
                    within = amounts + modules_in_all + tl.load(own + 7)
                    back = tl.load(matrices + 2 * module + 1)
                    single = tl.load(own + 9)
                    rank = tl.load(own + 8)
                    for at in range(0, rank, _LINES):
                        lane = at + tl.arange(0, _LINES)
                        share = tl.load(within + lane, mask=lane < rank, other=0.0)
                        inside = (lane[:, None] < rank) & there[None, :]
                        lines = _numbers(back, single, lane[:, None] * wide + part[None, :], inside)
                        sums += tl.sum(share[:, None] * lines, 0)
    if (acts != 0) | (in_place == 0):
        state = tl.load(to + n * d + part, mask=there, other=0.0)
        added = (state.to(tl.float32) + sums.to(state.dtype).to(tl.float32)).to(state.dtype)
        tl.store(out + n * d + part, tl.where(acts != 0, added, state), mask=there)

"""Attention over few tokens as Triton kernels: all keys of a head in one tile, nothing but the output written.

Libraries' kernels are made for long sequences: they cut them into tiles of 128, which 50 or 77 tokens leave half empty,
and gather the gradient of queries in float32 in a kernel of its own. Here every gradient is written once: up to 128
tokens a program owns a head; beyond, what it would have to hold leaves no room for tiles that keep the card busy, and
queries and keys have a kernel each. Tensors are [batch, tokens, heads, width]; the width is contiguous, other strides
are as they come.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

FORWARD = {
    16: (16, 16, 4, 1),
    32: (32, 32, 4, 1),
    64: (64, 64, 4, 1),
    128: (64, 64, 4, 2),
    256: (64, 64, 4, 2),
}
"""By keys in a tile of the backward pass: queries and keys in one of the forward pass, warps, loads under way."""
BACKWARD = {16: (16, 4, 1), 32: (32, 4, 1), 64: (32, 4, 2), 128: (32, 8, 2)}
"""By keys in a tile: queries that are looked at together, warps, loads under way. More queries fill the registers."""
MANY = 256
"""Keys in the tile that has a kernel for queries and one for keys."""
BACKWARD_QUERIES = (64, 4, 1)
"""For that tile: queries of a program, warps, loads in flight."""
BACKWARD_KEYS = (64, 64, 4, 1)
"""Keys of a program, queries that are looked at together, warps, loads under way."""
ROWS_BESIDE = 64
"""Queries that are looked at together for the key beside the tile."""
LOG2_E = 1.4426950408889634


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, norms, sharpness, tokens, heads,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    CAUSAL: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Softmax over keys, tile by tile, for ROWS queries of one head; `norms` get log2 of the sums that divide."""
    tiles = tl.cdiv(tokens, ROWS)
    program = tl.program_id(0)
    head = (program // tiles) % heads
    batch = (program // tiles // heads).to(tl.int64)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    feature = tl.arange(0, WIDTH)
    row = (program % tiles) * ROWS + tl.arange(0, ROWS)
    inside = row < tokens
    queries = tl.load(q + row[:, None] * q_token + feature[None, :], mask=inside[:, None], other=0.0)
    end = tokens
    if TAIL:  # the one key that the tiles leave over opens the sums
        end = tokens - 1
        key = tl.load(k + end * k_token + feature).to(tl.float32)
        value = tl.load(v + end * v_token + feature).to(tl.float32)
        top = tl.sum(queries.to(tl.float32) * key[None, :], 1) * sharpness
        total = tl.full([ROWS], 1.0, tl.float32)
        sums = tl.zeros([ROWS, WIDTH], tl.float32) + value[None, :]
    else:
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, WIDTH], tl.float32)
    if CAUSAL:
        end = tl.minimum(end, (program % tiles + 1) * ROWS)
    for first in range(0, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        if FULL:
            keys = tl.load(k + column[None, :] * k_token + feature[:, None])
            values = tl.load(v + column[:, None] * v_token + feature[None, :])
        else:
            keys = tl.load(k + column[None, :] * k_token + feature[:, None], mask=(column < tokens)[None, :], other=0.0)
            values = tl.load(
                v + column[:, None] * v_token + feature[None, :], mask=(column < tokens)[:, None], other=0.0
            )
        scores = tl.dot(queries, keys) * sharpness
        if CAUSAL:  # padding comes after every query, so that this leaves it out, too
            scores = tl.where(column[None, :] <= row[:, None], scores, float("-inf"))
        elif not FULL:
            scores = tl.where((column < tokens)[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None])
        top = higher
    place = (batch * tokens + row[:, None]) * heads + head
    tl.store(out + place * WIDTH + feature[None, :], (sums / total[:, None]).to(out.dtype.element_ty), inside[:, None])
    tl.store(norms + (batch * heads + head) * tokens + row, top + tl.log2(total), inside)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, norms, weights_beside, slopes_beside, changes_beside, dq, dk, dv, scale, sharpness, tokens, heads,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, grad_batch, grad_token, grad_head,
    out_batch, out_token, out_head,
    CAUSAL: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """All gradients of one head. Scores are stored key by query: sums for keys and values take them from registers.

    Rows and columns beyond the tokens are zero where they are loaded, and so is what comes of them.
    """
    head = tl.program_id(0) % heads
    batch = (tl.program_id(0) // heads).to(tl.int64)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    grad += batch * grad_batch + head * grad_head
    norms += (batch * heads + head) * tokens
    weights_beside += (batch * heads + head) * tokens
    slopes_beside += (batch * heads + head) * tokens
    changes_beside += (batch * heads + head) * tokens
    dq += batch * out_batch + head * out_head
    dk += batch * out_batch + head * out_head
    dv += batch * out_batch + head * out_head
    feature = tl.arange(0, WIDTH)
    column = tl.arange(0, COLUMNS)
    present = (column < tokens)[:, None]
    if FULL:
        keys = tl.load(k + column[:, None] * k_token + feature[None, :])
        values = tl.load(v + column[:, None] * v_token + feature[None, :])
    else:
        keys = tl.load(k + column[:, None] * k_token + feature[None, :], mask=present, other=0.0)
        values = tl.load(v + column[:, None] * v_token + feature[None, :], mask=present, other=0.0)
    turned_keys = tl.trans(keys)
    key_sums = tl.zeros([COLUMNS, WIDTH], tl.float32)
    value_sums = tl.zeros([COLUMNS, WIDTH], tl.float32)
    if TAIL:
        key = tl.load(k + (tokens - 1) * k_token + feature).to(tl.float32)
    for first in range(0, tokens, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = row < tokens
        queries = tl.load(q + row[:, None] * q_token + feature[None, :], mask=inside[:, None], other=0.0)
        grads = tl.load(grad + row[:, None] * grad_token + feature[None, :], mask=inside[:, None], other=0.0)
        norm = tl.load(norms + row, mask=inside, other=0.0)
        scores = tl.dot(keys, tl.trans(queries)) * sharpness - norm[None, :]
        if CAUSAL:
            scores = tl.where(column[:, None] <= row[None, :], scores, float("-inf"))
        elif not FULL:
            scores = tl.where(present, scores, float("-inf"))
        weights = tl.exp2(scores)
        value_sums = tl.dot(weights.to(grads.dtype), grads, value_sums)
        slopes = tl.dot(values, tl.trans(grads))
        mean = tl.sum(weights * slopes, 0)
        if TAIL:
            weight = tl.load(weights_beside + row, mask=inside, other=0.0)
            slope = tl.load(slopes_beside + row, mask=inside, other=0.0)
            mean += weight * slope
            change = weight * (slope - mean)
            tl.store(changes_beside + row, change, inside)
        changes = (weights * (slopes - mean[None, :])).to(queries.dtype)
        key_sums = tl.dot(changes, queries, key_sums)
        query_sums = tl.dot(turned_keys, changes)
        if TAIL:
            query_sums += key[:, None] * change[None, :]
        tl.store(
            dq + row[None, :] * out_token + feature[:, None],
            (query_sums * scale).to(dq.dtype.element_ty),
            inside[None, :],
        )
    place = column[:, None] * out_token + feature[None, :]
    tl.store(dk + place, (key_sums * scale).to(dk.dtype.element_ty), present)
    tl.store(dv + place, value_sums.to(dv.dtype.element_ty), present)


@triton.jit
def queries_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, norms, weights_beside, slopes_beside, changes_beside, means, dq, scale, sharpness, tokens, heads,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, grad_batch, grad_token, grad_head,
    out_batch, out_token, out_head,
    CAUSAL: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of ROWS queries of one head from all its keys at once; `means` are kept for those of keys."""
    tiles = tl.cdiv(tokens, ROWS)
    program = tl.program_id(0)
    head = (program // tiles) % heads
    batch = (program // tiles // heads).to(tl.int64)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    grad += batch * grad_batch + head * grad_head
    dq += batch * out_batch + head * out_head
    feature = tl.arange(0, WIDTH)
    column = tl.arange(0, COLUMNS)
    row = (program % tiles) * ROWS + tl.arange(0, ROWS)
    inside = row < tokens
    place = (batch * heads + head) * tokens + row
    queries = tl.load(q + row[:, None] * q_token + feature[None, :], mask=inside[:, None], other=0.0)
    grads = tl.load(grad + row[:, None] * grad_token + feature[None, :], mask=inside[:, None], other=0.0)
    norm = tl.load(norms + place, mask=inside, other=0.0)
    if FULL:
        keys = tl.load(k + column[:, None] * k_token + feature[None, :])
        values = tl.load(v + column[:, None] * v_token + feature[None, :])
    else:
        keys = tl.load(k + column[:, None] * k_token + feature[None, :], mask=(column < tokens)[:, None], other=0.0)
        values = tl.load(v + column[:, None] * v_token + feature[None, :], mask=(column < tokens)[:, None], other=0.0)
    scores = tl.dot(queries, tl.trans(keys)) * sharpness - norm[:, None]
    if CAUSAL:
        scores = tl.where(column[None, :] <= row[:, None], scores, float("-inf"))
    elif not FULL:
        scores = tl.where((column < tokens)[None, :], scores, float("-inf"))
    weights = tl.exp2(scores)
    slopes = tl.dot(grads, tl.trans(values))
    mean = tl.sum(weights * slopes, 1)
    if TAIL:
        weight = tl.load(weights_beside + place, mask=inside, other=0.0)
        slope = tl.load(slopes_beside + place, mask=inside, other=0.0)
        mean += weight * slope
    sums = tl.dot((weights * (slopes - mean[:, None])).to(keys.dtype), keys)
    if TAIL:
        key = tl.load(k + (tokens - 1) * k_token + feature).to(tl.float32)
        change = weight * (slope - mean)
        sums += change[:, None] * key[None, :]
        tl.store(changes_beside + place, change, inside)
    tl.store(means + place, mean, inside)
    tl.store(dq + row[:, None] * out_token + feature[None, :], (sums * scale).to(dq.dtype.element_ty), inside[:, None])


@triton.jit
def keys_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, norms, means, dk, dv, scale, sharpness, tokens, heads,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, grad_batch, grad_token, grad_head,
    out_batch, out_token, out_head,
    CAUSAL: tl.constexpr, FULL: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Gradients of COLUMNS keys of one head and of their values."""
    tile = tl.program_id(0) % TILES
    head = (tl.program_id(0) // TILES) % heads
    batch = (tl.program_id(0) // TILES // heads).to(tl.int64)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    grad += batch * grad_batch + head * grad_head
    norms += (batch * heads + head) * tokens
    means += (batch * heads + head) * tokens
    dk += batch * out_batch + head * out_head
    dv += batch * out_batch + head * out_head
    feature = tl.arange(0, WIDTH)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    present = (column < tokens)[:, None]
    if FULL:
        keys = tl.load(k + column[:, None] * k_token + feature[None, :])
        values = tl.load(v + column[:, None] * v_token + feature[None, :])
    else:
        keys = tl.load(k + column[:, None] * k_token + feature[None, :], mask=present, other=0.0)
        values = tl.load(v + column[:, None] * v_token + feature[None, :], mask=present, other=0.0)
    key_sums = tl.zeros([COLUMNS, WIDTH], tl.float32)
    value_sums = tl.zeros([COLUMNS, WIDTH], tl.float32)
    begin = 0
    if CAUSAL:  # no query before a key sees it
        begin = tile * COLUMNS
    for first in range(begin, tokens, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = row < tokens
        queries = tl.load(q + row[:, None] * q_token + feature[None, :], mask=inside[:, None], other=0.0)
        grads = tl.load(grad + row[:, None] * grad_token + feature[None, :], mask=inside[:, None], other=0.0)
        norm = tl.load(norms + row, mask=inside, other=0.0)
        mean = tl.load(means + row, mask=inside, other=0.0)
        scores = tl.dot(keys, tl.trans(queries)) * sharpness - norm[None, :]
        if CAUSAL:
            scores = tl.where(column[:, None] <= row[None, :], scores, float("-inf"))
        weights = tl.exp2(scores)
        value_sums = tl.dot(weights.to(grads.dtype), grads, value_sums)
        slopes = tl.dot(values, tl.trans(grads))
        key_sums = tl.dot((weights * (slopes - mean[None, :])).to(queries.dtype), queries, key_sums)
    place = column[:, None] * out_token + feature[None, :]
    tl.store(dk + place, (key_sums * scale).to(dk.dtype.element_ty), present)
    tl.store(dv + place, value_sums.to(dv.dtype.element_ty), present)


@triton.jit
def before_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, norms, weights, slopes, sharpness, tokens, heads,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, grad_batch, grad_token, grad_head,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """For the key next to the tile: its weight for each query, and the slope along it."""
    tiles = tl.cdiv(tokens, ROWS)
    program = tl.program_id(0)
    head = (program // tiles) % heads
    batch = (program // tiles // heads).to(tl.int64)
    feature = tl.arange(0, WIDTH)
    row = (program % tiles) * ROWS + tl.arange(0, ROWS)
    inside = row < tokens
    place = (batch * heads + head) * tokens + row
    q += batch * q_batch + head * q_head
    grad += batch * grad_batch + head * grad_head
    key = tl.load(k + batch * k_batch + head * k_head + (tokens - 1) * k_token + feature).to(tl.float32)
    value = tl.load(v + batch * v_batch + head * v_head + (tokens - 1) * v_token + feature).to(tl.float32)
    queries = tl.load(q + row[:, None] * q_token + feature[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    grads = tl.load(grad + row[:, None] * grad_token + feature[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    norm = tl.load(norms + place, mask=inside, other=0.0)
    tl.store(weights + place, tl.exp2(tl.sum(queries * key[None, :], 1) * sharpness - norm), inside)
    tl.store(slopes + place, tl.sum(grads * value[None, :], 1), inside)


@triton.jit
def after_kernel(  # type: ignore[no-untyped-def]
    q, grad, weights, changes, dk, dv, scale, tokens, heads,
    q_batch, q_token, q_head, grad_batch, grad_token, grad_head, out_batch, out_token, out_head,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradients of the key beside the tile and of its value."""
    head = tl.program_id(0) % heads
    batch = (tl.program_id(0) // heads).to(tl.int64)
    feature = tl.arange(0, WIDTH)
    q += batch * q_batch + head * q_head
    grad += batch * grad_batch + head * grad_head
    key_sums = tl.zeros([ROWS, WIDTH], tl.float32)
    value_sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(0, tokens, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = row < tokens
        place = (batch * heads + head) * tokens + row
        change = tl.load(changes + place, mask=inside, other=0.0)
        weight = tl.load(weights + place, mask=inside, other=0.0)
        queries = tl.load(q + row[:, None] * q_token + feature[None, :], mask=inside[:, None], other=0.0)
        grads = tl.load(grad + row[:, None] * grad_token + feature[None, :], mask=inside[:, None], other=0.0)
        key_sums += change[:, None] * queries.to(tl.float32)
        value_sums += weight[:, None] * grads.to(tl.float32)
    place = batch * out_batch + head * out_head + (tokens - 1) * out_token + feature
    tl.store(dk + place, (tl.sum(key_sums, 0) * scale).to(dk.dtype.element_ty))
    tl.store(dv + place, tl.sum(value_sums, 0).to(dv.dtype.element_ty))


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Output, contiguous, and the norms [batch, heads, tokens] that the backward pass needs."""
    q, k, v = (_contiguous_width(each) for each in (q, k, v))
    batch, tokens, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    norms = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    rows, columns, warps, stages = FORWARD[tile_of_keys(tokens, causal)]
    tail = not causal and tokens > 1 and tokens % columns == 1
    programs = batch * heads * triton.cdiv(tokens, rows)
    forward_kernel[(programs,)](
        q, k, v, out, norms, scale * LOG2_E, tokens, heads, *_strides(q, k, v),
        CAUSAL=causal, FULL=tail or tokens % columns == 0, TAIL=tail, WIDTH=width, ROWS=rows, COLUMNS=columns,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, norms


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, norms: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, scale: float, causal: bool,
) -> None:  # fmt: skip
    """Write the gradients of queries, keys and values, which have the same layout."""
    grad, q, k, v = (_contiguous_width(each) for each in (grad, q, k, v))
    batch, tokens, heads, width = q.shape
    columns = tile_of_keys(tokens, causal)
    sharpness, strides, beside = scale * LOG2_E, _strides(q, k, v, grad), tokens > columns
    weights, slopes, changes = (torch.empty_like(norms) if beside else norms for _ in range(3))
    if beside:
        before_kernel[(batch * heads * triton.cdiv(tokens, ROWS_BESIDE),)](
            q, k, v, grad, norms, weights, slopes, sharpness, tokens, heads, *strides, WIDTH=width, ROWS=ROWS_BESIDE
        )
    common = scale, sharpness, tokens, heads, *strides, *_strides(dq)
    kind = {"CAUSAL": causal, "TAIL": beside, "WIDTH": width}
    if columns < MANY:
        rows, warps, stages = BACKWARD[columns]
        backward_kernel[(batch * heads,)](
            q, k, v, grad, norms, weights, slopes, changes, dq, dk, dv, *common,
            **kind, FULL=tokens >= columns, ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    else:
        means = torch.empty_like(norms)
        rows, warps, stages = BACKWARD_QUERIES
        queries_kernel[(batch * heads * triton.cdiv(tokens, rows),)](
            q, k, v, grad, norms, weights, slopes, changes, means, dq, *common,
            **kind, FULL=tokens >= columns, ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        part, rows, warps, stages = BACKWARD_KEYS
        tiles = triton.cdiv(min(tokens, columns), part)
        keys_kernel[(batch * heads * tiles,)](
            q, k, v, grad, norms, means, dk, dv, *common,
            CAUSAL=causal, WIDTH=width, FULL=tokens >= tiles * part, ROWS=rows, COLUMNS=part, TILES=tiles,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    if beside:
        after_kernel[(batch * heads,)](
            q, grad, weights, changes, dk, dv, scale, tokens, heads, *_strides(q, grad, dq),
            WIDTH=width, ROWS=ROWS_BESIDE,
        )  # fmt: skip


def tile_of_keys(tokens: int, causal: bool) -> int:
    """The power of two that holds all keys, except one next to the tile."""
    rest = tokens - 1 if not causal and tokens - 1 in FORWARD else tokens
    return max(16, triton.next_power_of_2(rest))


def _contiguous_width(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _strides(*tensors: Tensor) -> list[Any]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]

"""The machine code of the chunk-parallel kernels for Hopper, searched for two faults of ptxas. Needs no GPU.

Seen on an H200 with Triton 3.6.0 (ptxas 12.8): the kernels whose machine code has the second fault, and no
others, gave wrong gradients or an illegal address.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
from prism.scan.triton import _chunkwise_backward as backward  # noqa: E402
from prism.scan.triton import _chunkwise_forward as forward  # noqa: E402
from prism.scan.triton import _operator, chunkwise  # noqa: E402
from prism.scan.triton import _segments as segments  # noqa: E402

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
pytestmark = [
    pytest.mark.skipif(not TOOL.exists(), reason="this Triton ships no nvdisasm"),
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="nothing is compiled under TRITON_INTERPRET=1"),
]

FLOAT32 = {
    *(
        "log_decay",
        "beta",
        "initial",
        "final",
        "d_final",
        "d_initial",
        "d_beta",
        "d_log_decay",
        "grown",
        "rest",
    ),
    *("scratch", "gate_grad", "beta_grad", "write_gate_grad", "reads", "kept"),
    *("transitions", "parts", "given", "out", "norms"),
}
OFFSETS = {"spans", "offsets", "chunk_start", "owner", "segments"}
COUNTS = {"T", "chunks_per_row", "H", "HV", "L", "slices", "row"}
SHARED = {"queries_grad": {"dq"}, "keys_grad": {"dk"}}
"""What is float32 too where value heads share a key head, and in the dtype of q elsewhere."""
BATCHES = tuple(itertools.product((False, True), repeat=2))
"""Packed, and whole chunks only."""


def programs(
    tuned: chunkwise.Tuning, K: int, V: int, writes: bool, packed: bool, whole: bool, states: bool
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name in `Tuning`, kernel and constants of everything that one forward and backward pass launches. What
    two levels launch beside the passes of one counts to packed sequences, whose tables they share: they alone
    have both tables and whole chunks."""
    if packed and whole:
        for name, kernel, constants in programs(tuned, K, V, writes, True, False, states):
            if name in ("scan", "reverse"):
                yield name, kernel, {**constants, "WHOLE": True}
        return
    base = {"K": K, "C": tuned.chunk, "BK": K, "PACKED": packed, "WHOLE": whole, "DOT": "tf32x3"}

    def slices(name: str) -> dict[str, int]:
        return {"V": V, "BV": getattr(tuned, name).v_block}

    table = {} if packed else {"spans": None}
    # Where the keys of the writes are: dense, or in rows, as `refined_scan` has them, which packs nothing.
    places = [{"row": None}] if packed or not writes else [{"row": None}, {}]
    tables = {} if packed else {"offsets": None, "chunk_start": None}
    no_writes = {} if writes else {"write_k": None, "by_writes": None}
    yield "prepare", forward.prepare_kernel, {**base, **table, "WIDE": False}
    if writes:
        for place in places:
            wide = {**base, **table, **place, "WIDE": False}
            yield "writes", forward.writes_kernel, {**wide, **slices("writes")}
            yield "output", forward.output_kernel, {**wide, **slices("output")}
            for norms in ({"norms": None}, {})[: 1 if place else 2]:
                constants = {**wide, **slices("writes_grad"), **norms}
                yield "writes_grad", backward.writes_grad_kernel, constants
    stages = tuned.scan.stages if writes else None
    unused = {"q": None, "scores": None, "o": None} if writes else {"write_state": None}
    unused.update({} if states else {"initial": None})
    scan = {
        **base,
        **slices("scan"),
        **tables,
        **unused,
        "INITIAL": states,
        "WRITES": writes,
        "STAGES": stages,
    }
    yield "scan", forward.scan_kernel, {**scan, "SAVE": True}
    if not writes:
        yield "scan", forward.scan_kernel, {**scan, "SAVE": False, "error": None, "states": None}
    unused = {"STAGES": tuned.reverse.stages, **({} if states else {"d_final": None})}
    yield (
        "reverse",
        backward.reverse_kernel,
        {**base, **slices("reverse"), **tables, **unused, "FINAL": states},
    )
    yield (
        "scores_grad",
        backward.scores_grad_kernel,
        {**base, **slices("scores_grad"), **table, "WIDE": False},
    )
    unused = {**no_writes, **({} if writes else {"write_gate_grad": None})}
    for place in places:
        ends = {**base, **table, **place, "WRITES": writes}
        yield "queries_grad", backward.queries_grad_kernel, {**ends, **slices("queries_grad"), **no_writes}
        yield "keys_grad", backward.keys_grad_kernel, {**ends, **slices("keys_grad"), **unused}
    if packed:
        at = {"K": K, "V": V, "C": tuned.chunk, "BK": K, "BV": tuned.segment.v_block, "DOT": "tf32x3"}
        unused = {**({} if writes else {"write_state": None}), **({} if states else {"initial": None})}
        unused["STAGES"] = tuned.segment.stages if writes else None
        yield "segment", segments.segment_kernel, {**at, **unused, "INITIAL": states, "WRITES": writes}
    if packed and not writes:
        unused = {} if states else {"d_final": None}
        yield "segment_reverse", segments.segment_reverse_kernel, {**at, **unused, "FINAL": states}
        at = {"K": K, "V": V, "BK": K, "BV": tuned.combine.v_block, "STEP": 32, "DOT": "tf32x3"}
        given = {"GIVEN": states, **({} if states else {"given": None})}
        for reverse in (False, True):
            yield "combine", segments.combine_kernel, {**at, **given, "REVERSE": reverse}


def machine_code(
    kernel: Any,
    constants: dict[str, Any],
    dtype: str,
    at: chunkwise.Launch,
    folder: Path,
    float32: Set[str] = FLOAT32,
) -> str:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for n, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in COUNTS:
            signature[name] = "i32"
        elif name == "scale":
            signature[name] = "fp32"
        else:
            kind = "fp32" if name in float32 else "i64" if name in OFFSETS else dtype
            signature[name] = f"*{kind}"
            attributes[(n,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=at.options)
    assert compiled.metadata.shared <= _operator.ROOM
    # A left operand in registers: `{sums}, {left}, descriptor`, not `{sums}, descriptor, descriptor`.
    assert not re.search(r"wgmma\.mma_async[^;]*?\}, *\{", compiled.asm["ptx"])
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    return subprocess.run([TOOL, "-c", binary], capture_output=True, text=True, check=True).stdout


def bad_sums(code: str) -> list[str]:
    """High words of a 64-bit sum with a constant that do not start from zero.

    The low word is a zero-extended address, so its high word is zero: `URZ`, or a register last set to it.
    """
    written: dict[str, str] = {}
    found = []
    for line in code.splitlines():
        text = re.sub(r"/\*[0-9a-f]*\*/", "", line).strip()
        match = re.match(
            r"(?:@!?U?P\d+ +)?(U[A-Z0-9_.]+|R2UR\S*|S2UR\S*|LDC\S*) +(UR\d+|UP\d+),? ?(.*);", text
        )
        if not match:
            continue
        name, target, operands = match.groups()
        source, *others = (x.strip() for x in operands.split(","))
        if name == "UIADD3.X" and others and re.match(r"-?0x[0-9a-f]{6,}", others[0]):
            zero = source == "URZ" or written.get(source, "").startswith("UMOV URZ")
            found += [] if zero else [text]
        written[target] = f"{name} {operands.strip()}"
        if name.endswith(".64"):
            written[f"UR{int(target[2:]) + 1}"] = name
    return found


def check(
    K: int, V: int, writes: bool, packed: bool, whole: bool, states: bool, folder: Path, only: str = ""
) -> None:
    many = chunkwise.tuning(torch.bfloat16, K, V, chunkwise.FEW_PROGRAMS + 1, writes, whole)
    few = chunkwise.tuning(torch.bfloat16, K, V, chunkwise.FEW_PROGRAMS, writes, whole)
    for tuned in (many, few):
        for name, kernel, constants in programs(tuned, K, V, writes, packed, whole, states):
            at = getattr(tuned, name)
            if only in ("", name) and (tuned is many or at != getattr(many, name)):
                for shared in (set(), SHARED[name]) if name in SHARED else (set(),):
                    code = machine_code(kernel, constants, "bf16", at, folder, FLOAT32 | shared)
                    assert not bad_sums(code), f"{name} at K = {K}, V = {V}, {at}, {constants}, {shared}"


def of(kernel: Any, options: dict[str, int], constants: dict[str, Any], float32: Set[str]) -> tuple[Any, ...]:
    """What tells programs apart; which tensors are float32 only where it is not always the same."""
    shared = set().union(*SHARED.values()) & float32 & set(kernel.arg_names)
    return kernel.__name__, *(tuple(sorted(x.items(), key=str)) for x in (options, constants)), *shared


def test_every_program_that_is_launched_is_in_the_list(monkeypatch):
    listed = set()
    for K, V, writes, batch, states in itertools.product(
        *[(64, 128)] * 2, (False, True), BATCHES, (False, True)
    ):
        for count in (chunkwise.FEW_PROGRAMS, chunkwise.FEW_PROGRAMS + 1):
            tuned = chunkwise.tuning(torch.bfloat16, K, V, count, writes, batch[1])
            for name, kernel, constants in programs(tuned, K, V, writes, *batch, states):
                for shared in (set(), SHARED[name]) if name in SHARED else (set(),):
                    listed.add(of(kernel, getattr(tuned, name).options, constants, shared))
    assert len(listed) == 494

    launches: list[Any] = []

    def launch(kernel, grid, key, arguments, constants, options):
        assert kernel.arg_names[len(arguments) :] == list(constants)
        if kernel is segments.cut_kernel:  # of whole numbers alone, which are read here
            for table in arguments[2:7]:
                table.zero_()
        else:
            launches.append((kernel, (*arguments, *constants.values()), options, key))

    monkeypatch.setattr(chunkwise, "launch", launch)

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    # T: gates of an odd number; whole chunks
    cases = itertools.product(
        ((64, 128), (100, 20)), (0, 2), (1, 2), (1, 65), (35, 64), (False, True), (0, 1, 2)
    )
    for (K, V), L, HV, B, T, levels, given in cases:
        for offsets in (None, torch.tensor([0, 0, 7, T])) if B == 1 else (None,):
            q, v, gate = zeros(B, T, 1, K), zeros(B, T, HV, V), zeros(B, T, HV, dtype=torch.float32)
            write_k, write_v = (zeros(B, T, HV, L, width) if L else None for width in (K, V))
            state = zeros(B if offsets is None else 3, HV, K, V, dtype=torch.float32)
            tuned = chunkwise._tuned(*chunkwise._widened(q, q, v, None, None, None)[1:3], write_k, offsets)
            tuned = tuned._replace(segment_chunks=int(levels))
            saved = chunkwise.allocate(q, v, write_k, offsets, tuned=tuned)
            inputs = (q, q, v, gate, gate, write_k, write_v, 1.0, state if given == 1 else None, offsets)
            chunkwise.forward(*inputs, saved, tuned=tuned)
            chunkwise.forward(*inputs, [], tuned=tuned)
            chunkwise.backward(v, state if given == 2 else None, *inputs, saved, tuned=tuned)
            if L and offsets is None and K == 64:
                for norms in (None, gate.new_zeros(B, T, HV, L)):
                    chunkwise.forward(*inputs, saved, tuned=tuned, row=100)
                    ends = {"row": 100, "norms": norms, "d_write_k": write_k}
                    chunkwise.backward(v, None, *inputs, saved, tuned=tuned, **ends)
    assert len({kernel.__name__ for kernel, *_ in launches}) == 12
    keys: dict[Any, set[Any]] = {}
    for kernel, arguments, options, key in launches:
        named = list(zip(kernel.arg_names, kernel.params, arguments, strict=True))
        constants = {name: x for name, param, x in named if param.is_constexpr or x is None}
        tensors = {name: x for name, _, x in named if isinstance(x, torch.Tensor)}
        float32 = {name for name, x in tensors.items() if x.dtype == torch.float32}
        program = of(kernel, options, constants, float32)
        assert program in listed, (kernel.__name__, options, constants)
        keys.setdefault((kernel, key), set()).add(program)
        assert float32 - {"dq", "dk"} == tensors.keys() & FLOAT32
        assert all(tensors[name].dtype == torch.int64 for name in tensors.keys() & OFFSETS)
        others = {name for name, *_ in named} - constants.keys() - tensors.keys()
        assert others <= COUNTS | {"scale"}
        assert not [name for name, x in tensors.items() if x.data_ptr() % 16]
    assert all(len(programs) == 1 for programs in keys.values())  # what launches take for one program


def test_a_bad_sum_is_found():
    """As nvdisasm printed them for a kernel that was wrong and for one that was right."""
    wrong = """UIADD3 UR42, UP0, UR4, 0x2, URZ ;
        UIADD3.X UR43, UR4, -0x7fffffe0, URZ, UP0, !UPT ;"""
    right = """UIADD3 UR44, UP0, UR20, 0x2, URZ ;
        UMOV UR20, URZ ;
        UIADD3.X UR20, UR20, 0x40000040, URZ, UP0, !UPT ;"""
    assert len(bad_sums(wrong)) == 1
    assert bad_sums(right) == []


@pytest.mark.parametrize("name", ["reverse", "queries_grad"])
def test_machine_code_of_two_kernels(name, tmp_path):
    check(64, 64, False, False, False, False, tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize(("packed", "whole"), BATCHES)
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_machine_code(K, V, writes, packed, whole, states, tmp_path):
    check(K, V, writes, packed, whole, states, tmp_path)

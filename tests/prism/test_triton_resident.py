"""`resident`, variant by variant, against the recurrence in float64: in Triton's interpreter, and on a GPU.

Which variant runs depends on dtype, widths, L, the number of sequences and whether anything needs a mask:
`test_which_variant_runs` says which. Inputs are rounded to the dtype under test before the reference sees
them, and new memory is filled with NaN, so that an element that no kernel wrote shows. In the interpreter
no kernel gets past the ends of its tensors (`fence`): what it read there and did not use would show nowhere.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from prism.scan.triton import _launch, resident  # noqa: E402
from prism.scan.triton._chunk_kernel import chunk_kernel  # noqa: E402
from prism.scan.triton._narrow_chunk_kernel import narrow_chunk_kernel  # noqa: E402

# Triton's interpreter turns run-time loop bounds into numbers in a way that numpy 2 warns about.
pytestmark = [
    pytest.mark.usefixtures("kernels"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
compiled = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under TRITON_INTERPRET=1")
# Largest |x - reference| / |reference| of an output or a gradient.
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 1e-2}


def check(scan_cases, inputs, dtype=torch.float32, device="cpu") -> dict[str, torch.Tensor]:
    """The kernels on the inputs in dtype (decays and beta in float32) against the definition in float64."""
    inputs = scan_cases.cast(inputs, dtype, log_decay=torch.float32, beta=torch.float32)
    inputs = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    exact = {name: x.double() if x is not None and x.is_floating_point() else x for name, x in inputs.items()}
    found = scan_cases.results(inputs, "triton")
    scan_cases.assert_close(found, scan_cases.results(exact, "recurrent"), BOUNDS[dtype])
    return found


@pytest.fixture
def many(monkeypatch):
    """Takes two sequences for many."""
    monkeypatch.setattr(resident, "FEW_PAIRS", 1)


@pytest.fixture(autouse=True)
def fence(request, monkeypatch):
    """An interpreted kernel fails that reads or writes, unmasked, outside of the tensors given to it."""
    if not INTERPRETED or request.node.get_closest_marker("interpreter") is None:
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    load, store = builder.create_masked_load, builder.create_masked_store
    given: set[tuple[int, int]] = set()

    def launch(kernel, grid, key, arguments, constants, options):
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        assert all(x.is_contiguous() for x in tensors)
        given.clear()
        given.update((x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors)
        _launch.launch(kernel, grid, key, arguments, constants, options)

    def check_addresses(pointers, mask):
        first = pointers.data[mask.data.astype(bool)]
        end = first + pointers.get_element_ty().primitive_bitwidth // 8
        inside = sum((start <= first) & (end <= stop) for start, stop in given) > 0
        if not inside.all():
            raise IndexError("outside of the tensors given")

    def create_masked_load(pointers, mask, *others):
        check_addresses(pointers, mask)
        return load(pointers, mask, *others)

    def create_masked_store(pointers, x, mask, *others):
        check_addresses(pointers, mask)
        return store(pointers, x, mask, *others)

    monkeypatch.setattr(resident, "launch", launch)
    monkeypatch.setattr(builder, "create_masked_load", create_masked_load)
    monkeypatch.setattr(builder, "create_masked_store", create_masked_store)


@triton.jit
def copy_kernel(x, y, n, m):
    tl.store(y + m, tl.load(x + n))


@pytest.mark.interpreter
def test_the_fence_holds():
    x, y = torch.zeros(2, 4)
    resident.launch(copy_kernel, (1, 1), None, (x, y, 3, 3), {}, {})
    for n, m in ((-1, 0), (0, 4)):
        with pytest.raises(triton.runtime.errors.InterpreterError, match="outside of the tensors given"):
            resident.launch(copy_kernel, (1, 1), None, (x[1:], y, n, m), {}, {})


NEEDS_NO_MASK = [(16, 16, 0), (16, 16, 2), (32, 32, 0), (32, 32, 2), (16, 32, 0), (32, 16, 2)]
NEEDS_MASKS = [(3, 2, 0), (2, 9, 2), (12, 20, 0), (20, 12, 2), (16, 16, 1)]


@pytest.mark.interpreter
@pytest.mark.parametrize(("K", "V", "L"), NEEDS_NO_MASK)
@pytest.mark.parametrize("T", [16, 48, 19])
def test_few_sequences(T, K, V, L, scan_cases):
    check(scan_cases, scan_cases.make(1, T, 1, 2, K, V, L))


@pytest.mark.interpreter
@pytest.mark.parametrize(("K", "V", "L"), NEEDS_NO_MASK)
@pytest.mark.parametrize("T", [16, 48, 19])
def test_many_sequences(T, K, V, L, scan_cases, many):
    check(scan_cases, scan_cases.make(1, T, 1, 2, K, V, L))


@pytest.mark.interpreter
@pytest.mark.parametrize(("K", "V", "L"), NEEDS_MASKS)
def test_widths_that_need_masks(K, V, L, scan_cases, monkeypatch):
    for few in (1024, 1):
        monkeypatch.setattr(resident, "FEW_PAIRS", few)
        check(scan_cases, scan_cases.make(1, 16, 1, 2, K, V, L))


@pytest.mark.interpreter
@pytest.mark.parametrize("L", [0, 2])
def test_pairs_that_do_not_fill_the_last_warp(L, scan_cases, many):
    check(scan_cases, scan_cases.make(3, 16, 1, 1, 16, 16, L))


@pytest.mark.interpreter
@pytest.mark.parametrize("T", [22, 32])  # with 32 nothing but the packing asks for masks
@pytest.mark.parametrize(("K", "L"), [(16, 0), (16, 2), (32, 2)])
def test_packed_sequences(K, L, T, scan_cases, monkeypatch):
    for few in (1024, 1):
        monkeypatch.setattr(resident, "FEW_PAIRS", few)
        check(scan_cases, scan_cases.make(1, T, 1, 2, K, K, L, offsets=[0, 3, 3, T]))


@pytest.mark.interpreter
@pytest.mark.parametrize("T", [16, 21])
@pytest.mark.parametrize(("K", "L"), [key[1:] for key in resident.NARROW if key[0] == torch.bfloat16])
def test_settings_of_the_narrow_chunk_kernel_for_bfloat16(K, L, T, scan_cases, monkeypatch):
    """In float32, all that the interpreter takes."""
    monkeypatch.setitem(resident.NARROW, (torch.float32, K, L), resident.NARROW[torch.bfloat16, K, L])
    check(scan_cases, scan_cases.make(1, T, 1, 2, K, K, L))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("B", [512, 2048])
@pytest.mark.parametrize(("K", "V", "L"), NEEDS_NO_MASK)
@pytest.mark.parametrize("T", [48, 41])
def test_on_a_gpu(T, K, V, L, B, dtype, scan_cases):
    inputs = scan_cases.make(B, T, 1, 1, K, V, L)
    found = check(scan_cases, inputs, dtype, "cuda")
    again = check(scan_cases, inputs, dtype, "cuda")
    assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("B", [256, 1024])
@pytest.mark.parametrize(("K", "V", "L"), [*NEEDS_NO_MASK, *NEEDS_MASKS])
def test_grouped_heads_on_a_gpu(K, V, L, B, dtype, scan_cases):
    check(scan_cases, scan_cases.make(B, 48, 1, 2, K, V, L), dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N", [512, 2048])
@pytest.mark.parametrize(("K", "V", "L"), NEEDS_NO_MASK)
def test_packed_sequences_on_a_gpu(K, V, L, N, dtype, scan_cases):
    lengths = torch.arange(N) % 4  # the reference walks through them one by one
    lengths[::64] = 37
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).tolist()
    check(scan_cases, scan_cases.make(1, offsets[-1], 1, 1, K, V, L, offsets=offsets), dtype, "cuda")


# What is launched -------------------------------------------------------------------------------------------


def launches(monkeypatch, B, T, K, V, L, *, H=1, HV=1, dtype=torch.float32, packed=False, state=False):
    """Kernel, key, constants, options and arguments of what a forward and a backward pass would launch."""
    found: list[tuple[Any, ...]] = []

    def launch(kernel, grid, key, arguments, constants, options):
        assert tuple(kernel.arg_names[len(arguments) :]) == tuple(constants)
        found.append((kernel, key, constants, options, arguments))

    monkeypatch.setattr(resident, "launch", launch)
    n = 3 if packed else B
    b = 1 if packed else B
    q, v, gate = (
        torch.empty(b, T, *shape, dtype=kind, device="meta")
        for shape, kind in (((H, K), dtype), ((HV, V), dtype), ((HV,), torch.float32))
    )
    write_k, write_v = (
        torch.empty(b, T, HV, L, width, dtype=dtype, device="meta") if L else None for width in (K, V)
    )
    initial = torch.empty(n, HV, K, V, device="meta") if state else None
    offsets = torch.empty(n + 1, dtype=torch.int64, device="meta") if packed else None
    inputs = (q, q, v, gate, gate, write_k, write_v, 1.0, initial, offsets)
    saved = resident.allocate(q, v, write_k, offsets)
    resident.forward(*inputs, saved)
    resident.forward(*inputs, [])
    resident.backward(v, initial, *inputs, saved)
    return found


@pytest.mark.parametrize(
    ("shape", "forward", "reverse"),
    [  # KL, U, J and EVEN of the walks
        ((1024, 128, 16, 16, 0), (2, 4, 4, True), (2, 4, 4, True)),
        ((1024, 128, 16, 16, 2), (2, 4, 4, True), (2, 4, 4, True)),
        ((1024, 128, 16, 16, 1), (1, 2, 1, False), (1, 2, 1, True)),
        ((1024, 127, 16, 16, 0), (2, 4, 4, False), (2, 4, 4, False)),
        ((1024, 128, 12, 16, 0), (2, 4, 4, False), (2, 4, 4, False)),
        ((1024, 128, 1, 16, 0), (1, 4, 1, True), (1, 4, 2, True)),
        ((1026, 128, 16, 16, 0), (1, 4, 1, True), (1, 4, 2, True)),
        ((1025, 128, 16, 16, 0), (1, 4, 1, False), (1, 4, 2, False)),
        ((1026, 128, 16, 16, 2), (1, 2, 1, False), (1, 2, 4, True)),
        ((1024, 128, 32, 32, 0), (1, 4, 1, True), (1, 4, 2, True)),
        ((1024, 128, 32, 32, 2), (1, 2, 1, True), (1, 4, 4, True)),
        ((1025, 128, 32, 32, 2), (1, 2, 1, False), (1, 4, 4, True)),
        ((1025, 128, 32, 32, 3), (1, 1, 1, False), (1, 1, 1, True)),
    ],
    ids=str,
)
def test_which_variant_runs(shape, forward, reverse, monkeypatch):
    ahead, _, back, _ = (c for _, _, c, *_ in launches(monkeypatch, *shape))
    for constants, expected in ((ahead, forward), (back, reverse)):
        assert tuple(constants[name] for name in ("KL", "U", "J", "EVEN")) == expected


@pytest.mark.parametrize(
    ("dtype", "K", "V", "L", "narrow"),
    [
        (torch.float32, 16, 16, 0, True),
        (torch.float32, 16, 16, 2, False),
        (torch.float32, 16, 17, 2, True),
        (torch.bfloat16, 3, 5, 2, True),
        (torch.bfloat16, 32, 32, 1, False),
        (torch.bfloat16, 33, 16, 0, False),
        (torch.float16, 16, 16, 0, False),
    ],
    ids=str,
)
def test_which_chunk_kernel_runs(dtype, K, V, L, narrow, monkeypatch):
    kernel = launches(monkeypatch, 2, 16, K, V, L, dtype=dtype)[-1][0]
    assert kernel is (narrow_chunk_kernel if narrow else chunk_kernel)


@compiled
def test_keys_tell_programs_apart(monkeypatch):
    programs: dict[Any, set[Any]] = {}
    shapes = itertools.product((2, 3, 2048, 2049), (16, 17), (12, 16, 32, 64), (16, 32), (0, 1, 2))
    heads = ((1, 1), (1, 2), (2, 2), (1, 16), (16, 16))
    for (B, T, K, V, L), (H, HV) in itertools.product(shapes, heads):
        for dtype in (torch.float32, torch.bfloat16) if L != 1 and HV == 1 else (torch.float32,):
            for packed, state in itertools.product((False, True), repeat=2) if B < 4 else ((False, False),):
                given = {"H": H, "HV": HV, "dtype": dtype, "packed": packed, "state": state}
                for kernel, key, constants, options, arguments in launches(
                    monkeypatch, B, T, K, V, L, **given
                ):
                    types = tuple(x.dtype if isinstance(x, torch.Tensor) else None for x in arguments)
                    parameters = kernel.params[: len(arguments)]
                    integers = tuple(
                        x
                        for x, parameter in zip(arguments, parameters, strict=True)
                        if isinstance(x, int) and not parameter.do_not_specialize
                    )
                    program = (*constants.items(), *options.items(), types, integers)
                    programs.setdefault((kernel, key), set()).add(program)
    assert len({kernel for kernel, _ in programs}) == 4
    assert all(len(found) == 1 for found in programs.values())


class RecordedDriver:
    """A CUDA driver that keeps what a launch hands over, so that launches can be compared without a GPU."""

    def __init__(self):
        self.calls = calls = []
        self.utils = self

        class Launcher:
            def __init__(self, source, metadata):
                self.name = source.fn.__name__

            def __call__(
                self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments
            ):
                kinds = [(a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in arguments]
                calls.append((self.name, (x, y, z), stream, function, kinds))

        self.launcher_cls = Launcher

    def load_binary(self, name, kernel, shared, device):
        return None, hash(kernel), 32, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 7

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@compiled
@pytest.mark.skipif(torch.cuda.is_available(), reason="replaces the CUDA driver")
@pytest.mark.parametrize(("L", "packed"), [(0, False), (2, True)])
def test_a_repeated_launch_hands_over_what_triton_would(monkeypatch, L, packed, scan_cases):
    driver = RecordedDriver()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)

    def launched(B, T, H=1, HV=2):
        x = scan_cases.make(B, T, H, HV, 16, 16, L, offsets=[0, 0, T] if packed else None)
        x = scan_cases.cast(x, torch.float32)
        inputs = [x[name] for name in ("q", "k", "v", "log_decay", "beta", "write_k", "write_v")]
        inputs += [0.25, x["initial_state"], x["cu_seqlens"]]
        driver.calls.clear()
        saved = resident.allocate(inputs[0], inputs[2], inputs[5], inputs[9])
        o, last = resident.forward(*inputs, saved)
        resident.backward(o, last, *inputs, saved)
        return list(driver.calls)

    monkeypatch.setattr(_launch, "_compiled", {})
    launched(1, 16)  # fills the cache
    # Two value heads: 600 sequences are many.
    for shape in ((1, 16), (1, 16, 1, 1), (3, 1), (600, 16), (16, 33), (512, 16)):
        again = launched(*shape)
        monkeypatch.setattr(_launch, "_compiled", {})
        assert again == launched(*shape)  # the same functions, grids and arguments
        last = "chunk_kernel" if L else "narrow_chunk_kernel"
        assert [call[0] for call in again] == ["forward_kernel", "reverse_kernel", last]


# What is compiled -------------------------------------------------------------------------------------------


def ptx(kernel, constants, options, dtype):
    """For Hopper, with the options that `resident` launches it with; needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kind = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}[dtype]
    others = {"scale": "fp32", "spans": "*i64"} | dict.fromkeys(("T", "N", "H", "HV", "L"), "i32")
    others |= dict.fromkeys(("log_decay", "beta", "states", "adjoints", "dlog_decay", "dbeta"), "*fp32")
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else others.get(name, kind) for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@compiled
@pytest.mark.parametrize(
    ("dtype", "K", "L"),
    [(torch.float32, 16, 2), (torch.bfloat16, 32, 2), (torch.bfloat16, 64, 2)]
    + [
        pytest.param(dtype, K, L, marks=pytest.mark.slow)
        for K in (16, 32, 64, 128, 256)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for L in ((0, 2) if K <= 32 else (2,))
        if (dtype, K, L) not in ((torch.float32, 16, 2), (torch.bfloat16, 32, 2), (torch.bfloat16, 64, 2))
    ],
    ids=str,
)
def test_no_product_becomes_the_instruction_that_is_compiled_wrongly(dtype, K, L, monkeypatch):
    """Triton 3.4 to 3.7 gets wgmma wrong on Hopper where it computed an operand; 32 rows are too few."""
    kernel, _, constants, options, _ = launches(monkeypatch, 1, 16, K, K, L, dtype=dtype)[-1]
    code = ptx(kernel, constants, options, dtype)
    assert "wgmma" not in code
    assert "mma.sync" in code or "fma.rn.f32" in code

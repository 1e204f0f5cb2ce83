"""Which kernel runs: for invented machines, as pure functions of a Problem."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import adatom
from adatom import evidence, registry
from adatom.device import CPU, INTERPRETER, Device, pretend
from adatom.ops.attention import api
from adatom.registry import ROWS, Row, choose, rows

MACHINES = {
    "sm_70": Device("cuda", 70, 80, 98304),
    "sm_80": Device("cuda", 80, 108, 166912),
    "sm_90": Device("cuda", 90, 132, 232448),
    "sm_100": Device("cuda", 100, 148, 232448),
    "sm_120": Device("cuda", 120, 170, 101376),
    "cpu": CPU,
    "interpreter": INTERPRETER,
}
PASSES = registry.PASSES["attention"]


def posed(machine: str = "sm_90", dtype: torch.dtype = torch.bfloat16, dim: int = 64, length: int = 256, **options):
    """The problem of self-attention (2, 4, length, dim) on an invented machine."""
    with pretend(MACHINES[machine]):
        q = torch.empty(2, 4, length, dim, dtype=dtype)
        return api.problem_of(q, q, q, **options)[0]


def chosen(problem, backend=None) -> dict[str, str]:
    return {op.removeprefix("attention_"): choose(op, problem, backend).backend for op in PASSES}


def every(backend: str) -> dict[str, str]:
    return {"fwd": backend, "bwd": backend, "bwd_bwd": backend, "jvp": backend}


@pytest.mark.parametrize("machine", ["sm_80", "sm_90", "sm_100", "interpreter"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_triton_from_sm_80_up(machine, dtype):
    backends = chosen(posed(machine, dtype))
    assert all(registry.serves("triton", backend) for backend in backends.values())


HOPPER = posed(dim=128)._replace(batch=8, heads=16, kv_heads=16, seqlen_q=4096, seqlen_k=4096, least_length=4096)


def test_head_dims_that_tma_cannot_store():
    """Inputs may be slices of wider rows; the results of some rows are not."""
    with pretend(MACHINES["sm_90"]):
        q = torch.empty(128, 16, 128, 40, dtype=torch.bfloat16)
        assert choose("attention_fwd", api.problem_of(q, q, q)[0]).backend == "hopper_tile"
        sliced = q[..., :36]
        problem = api.problem_of(sliced, sliced, sliced)[0]
    assert problem.tma and set(chosen(problem).values()) == {"torch_chunked"}


def test_hopper_where_it_is_faster():
    assert choose("attention_bwd", HOPPER).backend == "hopper"
    assert choose("attention_bwd", HOPPER._replace(seqlen_q=1024, seqlen_k=1024, least_length=512)).backend == "hopper"
    assert choose("attention_bwd", HOPPER._replace(window=True, window_keys=1024)).backend == "hopper"
    for keys, dim, backend in ((64, 128, "triton"), (128, 128, "hopper_ordered"), (128, 64, "hopper_ordered")):
        ordered = HOPPER._replace(window=True, window_keys=keys, head_dim=dim, head_dim_v=dim, deterministic=True)
        assert choose("attention_bwd", ordered).backend == backend
    lens = ordered._replace(kv_lens=True, window_keys=256, head_dim=128, head_dim_v=128)
    assert choose("attention_bwd", lens).backend == "triton"
    assert choose("attention_bwd", lens._replace(window_keys=512)).backend == "hopper_ordered"
    assert choose("attention_bwd", HOPPER._replace(kv_lens=True)).backend == "hopper"
    assert choose("attention_bwd", HOPPER._replace(deterministic=True)).backend == "hopper_ordered"
    assert choose("attention_bwd", HOPPER, "deterministic").backend == "hopper_ordered"
    biased = HOPPER._replace(batch=1, heads=32, kv_heads=32, bias="full", bias_grad=True, deterministic=True)
    for change, backend in (
        ({}, "hopper_ordered"), ({"batch": 2}, "hopper_ordered"), ({"bias_shared": True}, "hopper_ordered"),
        ({"causal": True}, "hopper_ordered"), ({"window": True, "window_keys": 2048}, "hopper_ordered"),
        ({"head_dim": 64, "head_dim_v": 96}, "hopper_ordered"), ({"deterministic": False}, "hopper"),
    ):  # fmt: skip
        assert choose("attention_bwd", biased._replace(**change)).backend == backend, change
    small, packed = {"seqlen_q": 256, "seqlen_k": 256, "least_length": 256}, {"varlen": True, "least_length": 128}
    capped = {"softcap": True, "causal": True}
    for some in (capped, small, small | {"causal": True}, packed):
        assert choose("attention_bwd", HOPPER._replace(**some)).backend == "hopper"
        assert choose("attention_bwd", HOPPER._replace(**some), "deterministic").backend == "hopper_ordered"
    few = HOPPER._replace(batch=1, kv_heads=3)  # 96 tiles, with a timetable
    assert choose("attention_bwd", few).backend == "hopper"
    assert choose("attention_bwd", few, "deterministic").backend == "hopper_ordered"
    alone = few._replace(heads=3)
    assert choose("attention_bwd", alone, "deterministic").backend == "hopper_ordered"
    narrow = alone._replace(head_dim=64, head_dim_v=64)
    assert choose("attention_bwd", narrow, "deterministic").backend == "hopper_ordered"
    for heads in (1, 2):  # 32 tiles of one: ranges of queries
        assert choose("attention_bwd", alone._replace(heads=heads, kv_heads=heads)).backend == "hopper"
    for convoy in ({"kv_lens": True}, {"head_dim": 32, "head_dim_v": 32, "softcap": True}, {"least_length": 512}):
        assert choose("attention_bwd", alone._replace(**convoy), "deterministic").backend == "triton"
    assert choose("attention_bwd", few._replace(causal=True), "deterministic").backend == "hopper_ordered"
    learned = HOPPER._replace(bias="full", bias_dtype=torch.bfloat16, bias_grad=True, bias_shared=True)
    assert choose("attention_bwd", learned).backend == "hopper"
    assert choose("attention_bwd", learned._replace(bias="key", bias_grad=False)).backend == "hopper"
    assert choose("attention_bwd", learned._replace(bias="query")).backend == "hopper"
    narrow = {"head_dim": 64, "head_dim_v": 64}
    for grad, shared in ((False, False), (True, True)):
        of_float32 = learned._replace(bias_dtype=torch.float32, bias_grad=grad, bias_shared=shared, **narrow)
        assert choose("attention_bwd", of_float32).backend == "hopper"
    for other in (
        {"seqlen_q": 255, "least_length": 128},
        {"head_dim": 32, "head_dim_v": 32, "seqlen_k": 1024, "least_length": 512},
        {"batch": 1, "kv_heads": 1, "seqlen_q": 1024, "least_length": 1024},
        {"window": True, "window_keys": 64},
        {"varlen": True, "least_length": 64},
        {"varlen": True, "least_length": 128, **narrow},
        {"bias": "full", "bias_dtype": torch.bfloat16, "least_length": 512, **narrow},
        {"bias": "full", "bias_dtype": torch.bfloat16, "least_length": 512, "causal": True},
        {"bias": "full", "bias_dtype": torch.float32},
        {"bias": "full", "bias_dtype": torch.float32, "bias_grad": True, **narrow},
        {"bias": "full", "bias_dtype": torch.bfloat16, "softcap": True},
        {"bias": "key", "bias_dtype": torch.bfloat16, "bias_grad": True},
    ):
        slow = HOPPER._replace(**other)
        assert choose("attention_bwd", slow).backend == "triton"
        assert choose("attention_bwd", slow, "hopper").backend == "hopper_any"


@pytest.mark.parametrize(("each", "rounded", "backend"), [(300, 256, "hopper"), (255, 128, "triton")])
def test_packed_sequences_count_by_their_average(each, rounded, backend):
    q = torch.empty(100 * each, 32, 64, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(101, dtype=torch.int32, device="meta")
    with pretend(MACHINES["sm_90"]):
        problem = api.problem_of(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends)[0]
    assert problem.least_length == rounded
    assert choose("attention_bwd", problem).backend == backend


def test_hopper_has_whole_heads_of_head_dim_32():
    """Where a program can have all of a head: short ones too, if there are enough, with a result that repeats."""
    sizes = {"seqlen_q": 384, "seqlen_k": 384, "least_length": 384, "head_dim": 32, "head_dim_v": 24}
    short = HOPPER._replace(batch=64, heads=4, kv_heads=4, **sizes)
    assert choose("attention_bwd", short).backend == "hopper"
    assert choose("attention_bwd", short._replace(causal=True), "deterministic").backend == "hopper_ordered"
    for other in (
        {"batch": 40},  # 160 heads, 132 multiprocessors
        {"batch": 16},
        {"kv_heads": 2},
        {"seqlen_q": 200, "least_length": 200},
        {"seqlen_q": 700},
        {"bias": "full", "bias_dtype": torch.float32},
    ):
        assert choose("attention_bwd", short._replace(**other)).backend == "triton"


def test_hopper_beyond_head_dim_128():
    deep = HOPPER._replace(head_dim=192, head_dim_v=128)
    assert choose("attention_bwd", deep).backend == "hopper_deep"
    assert choose("attention_bwd", deep._replace(causal=True), "hopper").backend == "hopper_deep"
    assert choose("attention_bwd", deep, "deterministic").backend == "hopper_deep"
    for other in ({"bias": "full", "bias_dtype": torch.bfloat16}, {"tma": False}):
        assert choose("attention_bwd", deep._replace(**other)).backend == "triton"
    assert choose("attention_bwd", deep._replace(softcap=True)).backend == "hopper_deep"
    assert choose("attention_bwd", deep._replace(batch=1, heads=1, kv_heads=1)).backend == "hopper_deep"
    few = deep._replace(batch=1, heads=1, kv_heads=1, seqlen_q=1024, seqlen_k=1024, least_length=1024)
    assert choose("attention_bwd", few).backend == "triton"
    assert choose("attention_bwd", few, "hopper").backend == "hopper_deep_any"
    packed = deep._replace(varlen=True, batch=16, least_length=32)
    assert choose("attention_bwd", packed).backend == "hopper_deep"
    for small in ({"least_length": 16}, {"heads": 1, "kv_heads": 1, "seqlen_q": 1024, "seqlen_k": 1024}):
        assert choose("attention_bwd", packed._replace(**small)).backend == "triton"
        assert choose("attention_bwd", packed._replace(**small), "hopper").backend == "hopper_deep_any"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": MACHINES["sm_80"]}, "Hopper"),
        ({"device": MACHINES["sm_100"]}, "Hopper"),
        ({"dtype": torch.float32}, "float16 and bfloat16; got torch.float32"),
        ({"head_dim": 136, "bias": "query"}, "head_dim must be a multiple of 8 from 8 to 128; got 136"),
        ({"head_dim_v": 192, "bias": "query"}, "v's head_dim must be"),
        ({"seqlen_k": 0}, "empty"),
        ({"bias": "full", "bias_dtype": torch.bfloat16, "bias_tma": False}, "a bias with contiguous keys"),
        ({"tma": False}, "multiples of 16 bytes"),
    ],
)
def test_what_hopper_does_not_take(change, words):
    assert choose("attention_bwd", HOPPER._replace(**change)).backend == "triton"
    with pytest.raises(NotImplementedError, match=words):
        choose("attention_bwd", HOPPER._replace(**change), "hopper")


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, 0),
        ({"causal": True}, 0),
        ({"window": (10, 5)}, 16),
        ({"window": (20, None), "causal": True}, 32),
        ({"window": (None, 5)}, 256),
        ({"window": (500, 500)}, 0),  # cuts nothing
    ],
)
def test_keys_of_a_window(options, keys):
    assert posed(**options).window_keys == keys


@pytest.mark.parametrize(
    "problem",
    [
        posed("sm_70"),
        posed("cpu"),
        posed(dtype=torch.float64),
        posed(dim=12),
        posed(dim=264),
        posed("cpu", torch.float64),
    ],
    ids=["sm_70", "cpu", "float64", "head_dim 12", "head_dim 264", "float64 on a cpu"],
)
def test_torch_where_triton_cannot(problem):
    assert chosen(problem) == every("torch_chunked")


def attended(machine: str = "sm_90", dtype: torch.dtype = torch.bfloat16, dims=(64, 64), lengths=(512, 512), **options):
    """The problem of attention with 8 x 8 heads on an invented machine: large enough for every kernel."""
    with pretend(MACHINES[machine]):
        q, k, v = (torch.empty(8, 8, n, d, dtype=dtype) for n, d in zip((*lengths, lengths[1]), (dims[0], *dims)))
        return api.problem_of(q, k, v, **options)[0]


def biased(*shape: int, dtype: torch.dtype = torch.bfloat16):
    return {"bias": torch.empty(shape, dtype=dtype)}


@pytest.mark.parametrize(
    "problem",
    [
        attended(),
        attended(dtype=torch.float16, dims=(40, 40)),
        attended(dims=(192, 128), lengths=(500, 300), causal=True, window=(100, None)),
        attended(dims=(256, 256), softcap=20.0, sinks=torch.empty(8)),
        attended(kv_lens=torch.full((8,), 300)),
        attended(**biased(1, 8, 512, 512)),
        attended(lengths=(512, 500), **biased(8, 1, 1, 500)),
        attended(dims=(128, 128), **biased(8, 1, 512, 512, dtype=torch.bool)),
        attended(**biased(8, 8, 512, 512, dtype=torch.float32)),
        attended(bias=torch.empty(1, 8, 512, 512, dtype=torch.bfloat16).expand(8, 8, 512, 512)),
    ],
)
def test_hopper_takes_the_forward(problem):
    deep, dim = problem.head_dim == 192, problem.head_dim
    forward = "hopper_deep" if deep else "hopper"
    backward = "hopper_deep" if dim > 128 else "hopper" if dim == 128 or problem.bias == "none" else "triton"
    assert chosen(problem) == every("triton") | {"fwd": forward, "bwd": backward}
    assert choose("attention_fwd", problem._replace(deterministic=True)).backend == forward


@pytest.mark.parametrize(
    "problem, why",
    [
        (attended("sm_80"), "needs a Hopper GPU"),
        (attended("sm_100"), "needs a Hopper GPU"),
        (attended(dtype=torch.float32), "takes float16 and bfloat16"),
        (attended(dims=(100, 100)), "takes head_dims in multiples of 8; got 100, v's 100"),  # nor do strides suit TMA
        (attended(dims=(64, 264)), "v's head_dim must be a multiple of 8 from 8 to 256"),
        (attended(dims=(32, 16)), "head_dim of 32 or less"),
        (attended(softcap=20.0), "with softcap"),
        (attended(lengths=(64, 512)), "64 queries or fewer"),
        (posed(), "so few queries"),
        (attended(lengths=(0, 512)), "empty tensors"),
        (attended(lengths=(512, 500), **biased(1, 8, 512, 500)), "needs a bias with contiguous keys"),
        (attended(dims=(128, 128), **biased(8, 8, 512, 512, dtype=torch.float32)), "float32 bias"),
        (attended(bias=torch.empty(8, 8, 1, 512).expand(8, 8, 512, 512)), "needs a bias with contiguous keys"),
        (attended()._replace(tma=False), "addresses and strides of q, k and v"),
        (attended()._replace(varlen=True, heads=1), "so few queries"),
    ],
)
def test_hopper_says_what_it_leaves_to_triton(problem, why):
    with pytest.raises(NotImplementedError, match=why):
        choose("attention_fwd", problem, "hopper")


def test_strides_that_tma_cannot_take():
    with pretend(MACHINES["sm_90"]):
        far = torch.empty(8, 8, 512, 72, dtype=torch.bfloat16)[..., :64]  # rows 144 bytes apart
        odd = torch.empty(8, 8, 512, 68, dtype=torch.bfloat16)[..., :64]  # 136 bytes
        same = torch.empty(8, 8, 1, 64, dtype=torch.bfloat16).expand(8, 8, 512, 64)
        alone = torch.empty(512 * 64, dtype=torch.bfloat16).as_strided((1, 1, 512, 64), (1, 3, 64, 1))
        assert [api.problem_of(x, x, x)[0].tma for x in (far, odd, same, alone)] == [True, False, False, True]


def test_the_second_derivative_of_float32_needs_shared_memory():
    small = posed("sm_120", torch.float32, 136)
    assert chosen(small) == every("triton") | {"bwd_bwd": "torch_chunked"}
    assert chosen(posed("sm_120", torch.float32, 136, precision="tf32")) == every("triton")
    assert chosen(posed("sm_120", torch.float32, 128)) == every("triton")
    for machine in ("sm_80", "sm_90"):
        assert chosen(posed(machine, torch.float32, 136)) == every("triton")


def test_the_interpreter_is_a_machine_of_its_own(monkeypatch):
    q = torch.empty(1, 1, 8, 8)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert api.problem_of(q, q, q)[0].device == CPU
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert api.problem_of(q, q, q)[0].device == INTERPRETER


def test_a_bias_of_more_keys_than_32_bits_number():
    most = posed()._replace(seqlen_k=2**24, bias="full", bias_dtype=torch.bfloat16, bias_shared=True)
    assert registry.serves("triton", choose("attention_fwd", most).backend)
    assert choose("attention_fwd", most._replace(seqlen_k=2**25, bias="key"), "triton")
    assert chosen(most._replace(seqlen_k=2**25)) == every("torch_chunked") | {"bwd": "hopper_any"}


@pytest.mark.parametrize("backend", ["triton", "torch_chunked", "reference"])
def test_explicit_backend(backend):
    assert all(registry.serves(backend, name) for name in chosen(posed(), backend).values())


def test_explicit_backend_never_falls_back():
    for op in PASSES:
        with pytest.raises(NotImplementedError, match="triton: needs a CUDA device"):
            choose(op, posed("cpu"), "triton")
        with pytest.raises(NotImplementedError, match="compute capability 8.0 or newer; this is sm_70"):
            choose(op, posed("sm_70"), "triton")
    q = torch.zeros(1, 1, 4, 12)
    with pytest.raises(NotImplementedError, match="triton"):
        adatom.attention(q, q, q, backend="triton")


def test_unknown_backend_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="no backend 'cudnn' for attention_fwd; there are: one_tile, hopper_tile, short, hopper_deep, "
    ):
        choose("attention_fwd", posed(), "cudnn")


def test_deterministic_leaves_rows_that_vary_out(monkeypatch):
    fast = registry.Row("attention_bwd", "fast", "attention.reference:backward", lambda p: None, deterministic=False)
    monkeypatch.setattr(registry, "ROWS", (fast, *registry.ROWS))
    registry.choose.cache_clear()
    free, bound = posed(), posed()._replace(deterministic=True)
    assert chosen(free)["bwd"] == "fast"
    assert chosen(bound)["bwd"] == "triton"
    assert chosen(free, "deterministic") == chosen(bound)
    with pytest.raises(NotImplementedError, match="not deterministic"):
        choose("attention_bwd", bound, "fast")
    registry.choose.cache_clear()


def test_deterministic_is_torchs_flag():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert posed().deterministic
    finally:
        torch.use_deterministic_algorithms(before)
    assert posed().deterministic == before


def test_reasons_are_words_and_the_first_fit_row_is_chosen():
    for machine in MACHINES:
        for options in ({}, {"causal": True}, {"softcap": 3.0}, {"kv_lens": torch.tensor([3, 9])}):
            q = torch.empty(2, 4, 256, 64)
            with pretend(MACHINES[machine]):
                verdicts = adatom.explain("attention", q, q, q, **options)
            assert [(v.op, v.backend) for v in verdicts] == [(r.op, r.backend) for op in PASSES for r in rows(op)]
            for op in PASSES:
                mine = [v for v in verdicts if v.op == op]
                fit = [v for v in mine if v.unfit is None]
                assert [v for v in mine if v.chosen] == fit[:1]
                assert all(v.unfit is None or isinstance(v.unfit, str) and v.unfit for v in mine)
                assert fit[0].backend == choose(op, posed(machine, torch.float32, **options)).backend


def test_explain_prints_every_row_and_computes_nothing():
    q = torch.empty(1, 4, 1 << 20, 64, device="meta").expand(64, -1, -1, -1)
    with pretend(MACHINES["sm_90"]):
        text = str(adatom.explain("attention", q, q, q, causal=True, backend="torch_chunked"))
    assert text.count("-> torch_chunked      runs") == len(PASSES)
    refused = ("takes float16 and bfloat16", "at most 128 queries and 128 keys", "takes at most 16 queries")
    refused += ("takes a full bias of q's dtype",)
    refusals = sum(map(text.count, refused))
    assert (
        text.count("backend='torch_chunked' was asked for")
        == sum(row.op in PASSES for row in ROWS) - len(PASSES) - refusals
    )
    with pytest.raises(ValueError, match="no op 'convolution'; there are: attention"):
        adatom.explain("convolution", q)
    with pytest.raises(ValueError, match="no backend 'cudnn' for attention; there are: one_tile, .*, reference"):
        adatom.explain("attention", q, q, q, backend="cudnn")
    packed, ends = q[0, 0, :6].reshape(6, 1, 64), torch.tensor([0, 6], device="meta")
    for name in ("attention_varlen", "attention"):
        assert adatom.explain(name, packed, packed, packed, ends, ends)


@pytest.mark.parametrize(
    "op, given, options, says",
    [
        ("attention", 1, {}, "attention: missing a required argument: 'k'"),
        ("attention", 4, {}, "attention: too many positional arguments"),
        ("attention_varlen", 3, {}, "attention_varlen: missing a required argument: 'cu_seqlens_q'"),
        ("linear", 2, {"foo": 1}, "linear: got an unexpected keyword argument 'foo'"),
        ("swiglu", 2, {"approximate": "tanh"}, "swiglu: got an unexpected keyword argument 'approximate'"),
        ("layer_norm", 1, {"foo": 1}, "layer_norm: got an unexpected keyword argument 'foo'"),
        ("rms_norm", 3, {}, "rms_norm: too many positional arguments"),
        ("moe", 4, {}, "moe: missing a required argument: 'top_k'"),
        ("moe_routed", 5, {"top_k": 2}, "moe_routed: got an unexpected keyword argument 'top_k'"),
        ("moe_route", 1, {}, "moe_route: missing a required argument: 'top_k'"),
    ],
)
def test_explain_takes_what_the_function_takes(op, given, options, says):
    with pytest.raises(TypeError, match=f"adatom: {says}"):
        adatom.explain(op, *[torch.zeros(8, 8)] * given, **options)


def test_explain_names_the_parts_of_an_mlp():
    with pytest.raises(ValueError, match="mlp runs two ops: ask for swiglu or geglu, then for linear"):
        adatom.explain("mlp", *[torch.zeros(8, 8)] * 4)
    assert set(registry.PUBLIC) <= set(adatom.__all__)


def test_explain_poses_the_function_that_was_named(monkeypatch):
    """geglu has a gate of its own also where `approximate` is left out."""
    posed = []
    monkeypatch.setattr(registry, "verdicts", lambda op, problem, backend: posed.append(problem) or [])
    x = torch.zeros(8, 8)
    for name in ("swiglu", "geglu"):
        adatom.explain(name, x, x, x)
    assert len(posed) == 4 and posed[0] != posed[2]


def test_order_is_priority(monkeypatch):
    order = [Row("attention_fwd", name, f"attention.{name}:forward", lambda p: None) for name in ("slow", "fast")]
    monkeypatch.setattr(registry, "ROWS", tuple(order))
    assert registry.choose.__wrapped__("attention_fwd", posed()).backend == "slow"
    monkeypatch.setattr(registry, "ROWS", tuple(reversed(order)))
    assert registry.choose.__wrapped__("attention_fwd", posed()).backend == "fast"


def test_a_predicate_that_raises_is_a_bug_and_not_a_no(monkeypatch):
    def broken(problem):
        raise KeyError("no such field")

    rows = (Row("attention_fwd", "new", "attention.new:forward", broken), *ROWS)
    monkeypatch.setattr(registry, "ROWS", rows)
    with pytest.raises(KeyError, match="no such field"):
        registry.choose.__wrapped__("attention_fwd", posed())


def test_nothing_fits_lists_every_reason(monkeypatch):
    refusing = tuple(Row("attention_fwd", name, "", lambda p, n=name: f"{n} is shy") for name in ("one", "two"))
    monkeypatch.setattr(registry, "ROWS", refusing)
    with pytest.raises(NotImplementedError, match="(?s)one: one is shy.*two: two is shy"):
        registry.choose.__wrapped__("attention_fwd", posed())


def test_quadratic_reference_on_a_gpu_warns(monkeypatch):
    last = tuple(row for row in ROWS if row.backend == "reference")
    monkeypatch.setattr(registry, "ROWS", last)
    with pytest.warns(UserWarning, match="the reference, which is slow"):
        registry.choose.__wrapped__("attention_fwd", posed())


def test_last_row_of_every_pass_takes_everything():
    for op in PASSES:
        assert rows(op)[-1].unfit(posed("cpu", torch.float64, 7, softcap=2.0)) is None


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.op}-{r.backend}")
def test_every_launcher_exists(row):
    if evidence.on_gpu(row.target):
        pytest.importorskip("triton")
    assert callable(registry.load(row.target))


_IMPORT = """
import sys, time
import torch
begin = time.process_time()  # others may have the processor
import adatom
took = time.process_time() - begin
names = ("triton", "typer", "rich", "matplotlib", "transformers", "torch.utils.flop_counter")
heavy = [name for name in names if name in sys.modules]
print(took, *heavy)
"""


def test_import_is_light():
    fastest, loaded = 10.0, ""
    for _ in range(3):  # machines hiccup
        took, *heavy = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True).stdout.split()
        fastest, loaded = min(fastest, float(took)), " ".join(heavy)
        if fastest < 0.15:
            break
    print(f"import adatom: {fastest * 1e3:.0f} ms beyond importing torch")
    assert "triton" not in loaded.split()
    assert not loaded, f"import adatom imports {loaded}"
    assert fastest < 0.25

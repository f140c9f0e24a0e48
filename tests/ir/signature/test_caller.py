"""Calls of a captured program: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from qfuse.ir.errors import InputError
from qfuse.ir.graph.stage_graph import InputSpec, Mutation, OutputSpec, Signature, SymbolRange
from qfuse.ir.signature.caller import Caller

CPU = torch.device("cpu")
F32 = torch.float32


def tensor(name: str, *shape: int | str, dtype: torch.dtype = F32, **more: Any) -> InputSpec:
    return InputSpec(name, name, dtype, shape, CPU, **more)


def signature(args: Any, kwargs: Any, inputs: list[InputSpec], **more: Any) -> Signature:
    return Signature(
        in_spec=pytree.tree_structure((args, kwargs)),
        inputs=tuple(inputs),
        out_spec=more.pop("out_spec", pytree.tree_structure(0)),
        outputs=more.pop("outputs", (OutputSpec(0),)),
        **more,
    )


def text_encoder(**more: Any) -> Caller:
    """``forward(ids, mask, *, scale=2.0)`` with a batch and a length."""
    return Caller(
        signature(
            (0,),
            {"mask": 0, "scale": 0},
            [
                tensor("ids", "b", "s0", dtype=torch.int64),
                tensor("mask", "b", "s0"),
                InputSpec("scale", None, constant=2.0),
            ],
            symbols={
                "b": SymbolRange(1, 2, 16),
                "s0": SymbolRange(8, 8, None, multiple_of=8, label="length"),
            },
            parameters=("ids", "mask", "types"),
            defaults={"mask": None, "types": None, "scale": 2.0},
            **more,
        )
    )


def inputs(batch: int = 2, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(batch, length, dtype=torch.int64), torch.randn(batch, length)


def refusal(caller: Caller, *args: Any, **kwargs: Any) -> InputError:
    with pytest.raises(InputError) as error:
        caller.check(caller.bind(args, kwargs))
    assert error.value.fix, "a refusal says what to do"
    return error.value


def test_every_way_to_pass_the_same_arguments() -> None:
    caller = text_encoder()
    ids, mask = inputs()
    for args, kwargs in (
        ((ids,), {"mask": mask, "scale": 2.0}),
        ((ids,), {"scale": 2.0, "mask": mask}),
        ((ids, mask), {"scale": 2.0}),
        ((), {"mask": mask, "scale": 2.0, "ids": ids}),
        ((ids, mask), {}),
        ((ids, mask, None), {}),
        ((ids,), {"mask": mask, "types": None}),
    ):
        leaves = caller.bind(args, kwargs)
        assert leaves[0] is ids
        assert leaves[1] is mask
        assert leaves[2] == 2.0
        assert len(caller.check(leaves)) == 2


def test_arguments_that_do_not_bind() -> None:
    caller = text_encoder()
    ids, mask = inputs()
    call = "the captured call was (ids, mask=..., scale=...)"

    assert str(refusal(caller, mask=mask)) == (
        f"ids is missing: the model was captured with it\n  do: pass it; {call}"
    )
    # The default of `mask` is None, which is not what the model was captured with.
    assert (
        refusal(caller, ids).what == "mask: expected float32[b, length] with 1 <= b <= 16 and "
        "length >= 8 (length a multiple of 8), got None"
    )
    assert str(refusal(caller, ids, mask, types=ids)) == (
        "types is unexpected: the model was captured without it\n"
        f"  do: leave it out, or compile again with it; {call}"
    )
    assert refusal(caller, ids, mask, None, 1).what.startswith("argument 3 is unexpected")
    assert refusal(caller, ids, mask, ids=ids).what == (
        "ids was given twice, by position and by keyword"
    )
    assert refusal(caller, ids, mask, foo=None).what.startswith("foo is unexpected")
    # A misspelled name, and not that an argument is missing.
    assert refusal(caller, id=ids, mask=mask).what.startswith("id is unexpected")


MASK = (
    "mask: expected float32[b, length] with 1 <= b <= 16 and length >= 8 (length a multiple of 8)"
)


@pytest.mark.parametrize(
    ("mask", "what", "fix"),
    [
        (torch.zeros(2, 8, dtype=torch.float64), f"{MASK}, got float64[2, 8]",
         "convert it: mask.to(torch.float32)"),
        (torch.zeros(2, 8, device="meta"), f"{MASK} on cpu, got float32[2, 8] on meta",
         "move it: mask.to('cpu')"),
        (torch.zeros(8), f"{MASK}, got float32[8]", "pass 2 dimensions"),
        (torch.zeros(3, 8), f"{MASK}, got float32[3, 8]; b is 2 in an earlier input",
         "give every size b the same value"),
        (torch.zeros(2, 16), f"{MASK}, got float32[2, 16]; length is 8 in an earlier input",
         "give every size length the same value"),
        (1.5, f"{MASK}, got the float 1.5", "pass torch.tensor(1.5, dtype=torch.float32)"),
        ([1.5], f"{MASK}, got list", "pass a torch.Tensor of torch.float32"),
        (torch.zeros(2, 8).to_sparse(), f"{MASK}, got a tensor of layout torch.sparse_coo",
         "pass mask.to_dense()"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(mask: Any, what: str, fix: str) -> None:
    error = refusal(text_encoder(), inputs()[0], mask)
    assert (error.what, error.fix) == (what, fix)
    assert isinstance(error, ValueError)
    assert isinstance(error, TypeError)


@pytest.mark.parametrize(
    ("batch", "length", "what"),
    [
        (17, 8, "got 17 in axis 0"),
        (0, 8, "got 0 in axis 0"),
        (2, 0, "got 0 in axis 1"),
        (2, 12, "got 12 in axis 1"),
    ],
)
def test_sizes_out_of_range(batch: int, length: int, what: str) -> None:
    error = refusal(text_encoder(), *inputs(batch, length))
    assert error.what.startswith("ids: expected int64[b, length] with 1 <= b <= 16")
    assert error.what.endswith(what)


def test_exact_sizes() -> None:
    caller = Caller(signature((0,), {}, [tensor("x", 4, 3)], parameters=("x",)))
    assert caller.check([x := torch.randn(4, 3)])[0] is x
    error = refusal(caller, torch.randn(4, 5))
    assert error.what == "x: expected float32[4, 3], got float32[4, 5]"
    assert error.fix == (
        "pass 3 in axis 1, or compile with a Dim for axis 1 of x in dynamic_shapes if the "
        "model works for other sizes"
    )
    assert refusal(caller, torch.randn(4)).fix == "pass 2 dimensions"


def test_relations() -> None:
    symbols = {name: SymbolRange(1, 4, None) for name in ("a", "b")}
    caller = Caller(
        signature(
            (0, 0),
            {},
            [tensor("x", "a"), tensor("y", "b")],
            symbols=symbols,
            relations=("b == 2*a", "a % 2 == 0"),
        )
    )
    good, bad = (torch.randn(4), torch.randn(8)), (torch.randn(4), torch.randn(9))
    for _ in range(2):
        caller.check(good)
        error = refusal(caller, *bad)
        assert error.what == (
            "the sizes break 'b == 2*a', which the captured graph relies on: "
            "a (axis 0 of x) is 4, b (axis 0 of y) is 9"
        )
    caller = Caller(
        signature((0,), {}, [tensor("x", "a")], symbols=symbols, relations=("4 % (a // 4) == 0",))
    )
    assert "'4 % (a // 4) == 0'" in refusal(caller, torch.randn(3)).what
    caller.check([torch.randn(8)])


def test_every_relation_counts() -> None:
    caller = Caller(
        signature(
            (0, 0),
            {},
            [tensor("x", "a"), tensor("y", "b")],
            symbols={name: SymbolRange(1, 4, None) for name in ("a", "b")},
            relations=("b == 2*a", "a % 2 == 0"),
        )
    )
    assert "'a % 2 == 0'" in refusal(caller, torch.randn(3), torch.randn(6)).what


@pytest.mark.parametrize(
    ("constant", "same", "others"),
    [
        (3, [3], [3.0, True, "3", None, torch.tensor(3), 4]),
        (True, [True], [1, False, None]),
        (None, [None], [0, False, torch.zeros(1)]),
        ("a", ["a"], ["b", b"a"]),
        (float("nan"), [float("nan")], [0.0, None]),
    ],
)
def test_constants(constant: object, same: list[object], others: list[object]) -> None:
    spec = InputSpec("mode", None, constant=constant)
    caller = Caller(signature((0,), {}, [spec], parameters=("mode",)))
    for value in same:
        assert caller.check([value]) == []
    for value in others:
        error = refusal(caller, value)
        assert error.what.startswith(f"mode: the model was captured for {constant!r}, got ")


def nested() -> Caller:
    tree = {"a": 0, "b": (0, [0])}
    names = ["x['a']", "x['b'][0]", "x['b'][1][0]"]
    specs = [InputSpec(name, f"x_{i}", F32, (i,), CPU) for i, name in enumerate(names)]
    return Caller(signature((tree,), {}, specs, parameters=("x",)))


def test_nested_arguments() -> None:
    a, b, c = torch.randn(0), torch.randn(1), torch.randn(2)
    caller = nested()
    for tree in ({"a": a, "b": (b, [c])}, {"b": (b, [c]), "a": a}):
        leaves = caller.bind((tree,), {})
        assert [id(leaf) for leaf in leaves] == [id(a), id(b), id(c)]
        assert len(caller.check(leaves)) == 3


@pytest.mark.parametrize(
    ("tree", "what"),
    [
        ({"a": 0}, "x: expected dict with keys ['a', 'b'], got dict with keys ['a']"),
        ({"a": 0, "b": 0, "c": 0},
         "x: expected dict with keys ['a', 'b'], got dict with keys ['a', 'b', 'c']"),
        ({"a": 0, "b": (0, (0,))}, "x['b'][1]: expected list of 1, got tuple of 1"),
        ({"a": 0, "b": (0, [0, 0])}, "x['b'][1]: expected list of 1, got list of 2"),
        ({"a": 0, "b": 0}, "x['b']: expected tuple of 2, got a tensor or a constant"),
        (0, "x: expected dict with keys ['a', 'b'], got a tensor or a constant"),
    ],
)  # fmt: skip
def test_nested_arguments_that_do_not_fit(tree: Any, what: str) -> None:
    assert refusal(nested(), tree).what == what


def test_what_reaches_the_graph() -> None:
    caller = Caller(
        signature(
            (0, 0, 0),
            {},
            [tensor("x", 2, 3), tensor("y", 1, 2, 3, 4, order=(0, 2, 3, 1)), tensor("z", 2, 3)],
        )
    )
    x = torch.randn(3, 2, requires_grad=True).t()
    y = torch.randn(1, 2, 3, 4)
    z = torch.randn(2, 3, dtype=torch.complex64).conj().imag
    assert z.is_neg()
    got = caller.check([x, y, z])

    assert [torch.equal(a, b) for a, b in zip(got, (x, y, z), strict=True)] == [True] * 3
    assert got[0].is_contiguous()
    assert not got[0].requires_grad
    assert got[1].is_contiguous(memory_format=torch.channels_last)
    assert not got[2].is_neg()
    # What fits already is not copied.
    fits = y.to(memory_format=torch.channels_last)
    assert caller.check([x, fits, z])[1].data_ptr() == fits.data_ptr()


def test_results() -> None:
    spec = pytree.tree_structure({"out": 0, "rest": (0, 0, [0, 0, 0])})
    caller = Caller(
        signature(
            (0, 0),
            {},
            [tensor("x", "a"), tensor("y", "b")],
            out_spec=spec,
            outputs=(
                OutputSpec(1),
                OutputSpec(None, input_index=1),
                OutputSpec(None, constant="c"),
                OutputSpec(0),
                OutputSpec(None, size="2*a + b"),
                OutputSpec(0),
            ),
            symbols={"a": SymbolRange(0, 3, None), "b": SymbolRange(0, 4, None)},
        )
    )
    x, y, u, v = torch.randn(3), torch.randn(4), torch.randn(1), torch.randn(2)
    result = caller.rebuild([u, v], [x, y])

    assert result == {"out": v, "rest": (y, "c", [u, 10, u])}
    assert result["rest"][2][0] is result["rest"][2][2]


def test_writes() -> None:
    state = torch.zeros(4)
    module = torch.fx.GraphModule({"state": state}, torch.fx.Graph())
    module.register_buffer("state", state)
    caller = Caller(
        signature(
            (0,),
            {},
            [tensor("x", 4)],
            outputs=(OutputSpec(None, input_index=0), OutputSpec(0), OutputSpec(1)),
            out_spec=pytree.tree_structure((0, 0, 0)),
            mutations=(Mutation(0, buffer="state"), Mutation(1, input_index=0)),
        )
    )
    x = torch.ones(4)
    # The new state is the old input and the other way round, and so are two of the results.
    result = caller.finish(module, [x, state, x, state[:2]], [x])

    assert torch.equal(state, torch.ones(4))
    assert torch.equal(x, torch.zeros(4))
    assert result[0] is x
    assert torch.equal(result[1], torch.ones(4))
    assert torch.equal(result[2], torch.zeros(2))


def test_overlapping_memory_matters_only_where_something_is_written() -> None:
    specs = [tensor("x", 4), tensor("y", 4)]
    memory = torch.randn(8)
    reads = Caller(signature((0, 0), {}, specs))
    assert len(reads.check([memory[:4], memory[2:6]])) == 2
    writes = Caller(signature((0, 0), {}, specs, mutations=(Mutation(0, input_index=1),)))
    assert len(writes.check([memory[:4], memory[4:]])) == 2
    assert len(writes.check([torch.randn(4), torch.randn(4)])) == 2
    for x, y in ((memory[:4], memory[2:6]), (memory[2:6], memory[:4]), (memory[::2], memory[:4])):
        error = refusal(writes, x, y)
        assert error.what == "y shares memory with x, and the model writes it"
        assert error.fix == "pass x.clone()"


@pytest.mark.property
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4), st.booleans()), max_size=6),
)
def test_overlap_is_found_for_any_number_of_inputs(spans: list[tuple[int, int, bool]]) -> None:
    memory = torch.zeros(24)
    leaves = [memory[start : start + size] for start, size, _ in spans]
    written = [index for index, (_, _, write) in enumerate(spans) if write]
    caller = Caller(
        signature(
            (0,) * len(spans),
            {},
            [tensor(f"x{i}", size) for i, (_, size, _) in enumerate(spans)],
            mutations=tuple(Mutation(i, input_index=index) for i, index in enumerate(written)),
        )
    )
    touched = [set(range(start, start + size)) for start, size, _ in spans]
    clash = any(touched[i] & touched[j] for i in written for j in range(len(spans)) if i != j)
    if clash:
        assert "shares memory" in refusal(caller, *leaves).what
    else:
        assert len(caller.check(leaves)) == len(spans)


def test_threads_share_a_caller() -> None:
    caller = text_encoder()
    failures: list[str] = []

    def work(batch: int) -> None:
        good, bad = inputs(batch, 8 * batch), (inputs(batch, 8)[0], inputs(batch, 16)[1])
        for _ in range(200):
            if len(caller.check(caller.bind(good, {}))) != 2:
                failures.append("refused")
            try:
                caller.check(caller.bind(bad, {}))
                failures.append("accepted")
            except InputError:
                pass

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []

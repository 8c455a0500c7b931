"""Which weights torch's 2:4 kernels take, and that an error converts none. The kernels themselves need a GPU."""

from typing import Any

import pytest
import torch
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS

from optimum_prune import PruningConfig, prune, semi_structured
from optimum_prune.binding import named_linears
from optimum_prune.errors import UnsupportedModel
from optimum_prune.semi_structured import MULTIPLES, Acceleration, accelerate_2_4_, why_dense
from tests.models import llama, t5, tokens

TWO_OF_FOUR = PruningConfig(pattern="2:4", scorer="magnitude")


def weight(rows=32, columns=64, dtype=torch.bfloat16):
    """Return a 2:4 weight."""
    return torch.ones(rows, columns, dtype=dtype) * torch.tensor([1, 0, 0, 1], dtype=dtype).repeat(columns // 4)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(semi_structured, "DEVICE", "cpu")


class Kernels:
    """Stands in for torch's class: keeps weights dense, and fails where it is told to."""

    BACKEND = "cusparselt"
    fails_at = None

    @classmethod
    def from_dense(cls, dense):
        if cls.fails_at == "compression" and dense.shape[0] == 48:
            raise RuntimeError("architecture mismatch")
        kernels = dense.clone()
        if cls.fails_at == "product":
            return kernels.double()[:, :-1].requires_grad_(False).as_subclass(Broken)
        return kernels


class Broken(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            raise NotImplementedError("Supported only on GPUs with compute capability 8.x")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.fixture
def kernels(on_cpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(semi_structured, "_backend", lambda: Kernels)
    monkeypatch.setattr(Kernels, "fails_at", None)
    return Kernels


# The rules


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("backend", "rows", "columns"), [("cutlass", 32, 64), ("cusparselt", 16, 16)])
def test_smallest_shapes(backend, rows, columns, dtype, on_cpu):
    assert why_dense(weight(rows, columns, dtype), backend) is None
    assert why_dense(weight(3 * rows, 5 * columns, dtype), backend) is None
    takes = rf"{backend} takes multiples of \({rows}, {columns}\)".replace("\\", "")
    assert why_dense(weight(rows + 8, columns, dtype), backend) == f"shape [{rows + 8}, {columns}]; {takes}"
    assert why_dense(weight(rows, columns + 8, dtype), backend) == f"shape [{rows}, {columns + 8}]; {takes}"


@pytest.mark.parametrize("kernels", [SparseSemiStructuredTensorCUTLASS, SparseSemiStructuredTensorCUSPARSELT])
@pytest.mark.parametrize("dtype", semi_structured.DTYPES)
def test_multiples_are_those_of_torch(kernels, dtype):
    constraints = kernels._DTYPE_SHAPE_CONSTRAINTS[dtype]
    assert MULTIPLES[kernels.BACKEND] == (constraints.sparse_min_rows, constraints.sparse_min_cols)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes(dtype, on_cpu):
    name = str(dtype).removeprefix("torch.")
    assert why_dense(weight(dtype=dtype), "cutlass") == f"{name}; the kernels take float16 and bfloat16"


def test_other_dimensions(on_cpu):
    assert why_dense(weight()[None], "cutlass") == "3 dimensions; the kernels take 2"


def test_every_four_inputs_need_two_zeros(on_cpu):
    given = weight()
    given[3, 1] = given[3, 9] = given[7, 2] = 1
    assert why_dense(given, "cutlass") == "not 2:4: 3 of 512 groups of 4 hold less than 2 zeros"
    assert why_dense(weight() * 0, "cutlass") is None  # more zeros are no harm
    half = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0], dtype=torch.bfloat16).repeat(32, 8)
    assert why_dense(half, "cutlass") == "not 2:4: 256 of 512 groups of 4 hold less than 2 zeros"


def test_groups_run_along_the_inputs(on_cpu):
    columnwise = weight(64, 64).t().contiguous()  # two of four, but down the rows
    assert "not 2:4" in str(why_dense(columnwise, "cutlass"))


def test_places():
    assert why_dense(weight(), "cutlass") == "it is on cpu"


# Converting


def test_without_cuda():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    model = llama()
    with pytest.raises(UnsupportedModel, match=r"run on CUDA .* finds no such device.* run it as it is"):
        accelerate_2_4_(model)


def test_a_model_that_is_not_on_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedModel, match=r"linears of the model are on cpu\. Call model\.to\('cuda'\)"):
        accelerate_2_4_(llama())


def test_what_can_be_is_converted_and_the_rest_named(kernels):
    model = llama(intermediate_size=72, num_attention_heads=4, num_key_value_heads=2).bfloat16()
    prune(model, TWO_OF_FOUR)
    with torch.no_grad():
        named_linears(model)["model.layers.1.self_attn.q_proj"].weight[0] = 1
        expected = model(tokens()).logits
    old = {name: linear.weight for name, linear in named_linears(model).items()}
    done = accelerate_2_4_(model)
    new = {name: linear.weight for name, linear in named_linears(model).items()}
    assert done.converted and done.left
    assert [*sorted([*done.converted, *done.left])] == sorted(new)
    assert [name for name in new if new[name] is not old[name]] == done.converted
    assert {name.rpartition(".")[2] for name in done.converted} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not any(new[name].requires_grad for name in done.converted)
    assert done.left["model.layers.1.self_attn.q_proj"].startswith("not 2:4: 8 of 256 groups")
    assert done.left["model.layers.0.mlp.up_proj"] == "shape [72, 32]; cusparselt takes multiples of (16, 16)"
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, expected)


def test_float32_parts_of_t5_are_named(kernels):
    model = t5().bfloat16()
    prune(model, TWO_OF_FOUR)
    name = "encoder.block.0.layer.1.DenseReluDense.wo"
    named_linears(model)[name].float()
    done = accelerate_2_4_(model)
    assert done.left[name].startswith("float32; ")


def test_nothing_to_convert_is_no_error(kernels):
    done = accelerate_2_4_(llama())
    assert done.converted == []
    assert set(done.left.values()) == {"float32; the kernels take float16 and bfloat16"}


@pytest.mark.parametrize(
    ("stage", "message"),
    [("compression", "architecture mismatch"), ("product", "Supported only on GPUs with compute capability 8.x")],
)
def test_an_error_converts_nothing(stage, message, kernels, monkeypatch):
    monkeypatch.setattr(Kernels, "fails_at", stage)
    model = llama().bfloat16()
    prune(model, TWO_OF_FOUR)
    old = list(model.parameters())
    with pytest.raises(UnsupportedModel, match=rf"\(cusparselt\) do not work on this GPU.* left as it was: {message}"):
        accelerate_2_4_(model)
    assert all(one is two for one, two in zip(old, model.parameters(), strict=True))


@pytest.mark.parametrize(("available", "backend"), [(True, "cusparselt"), (False, "cutlass")])
def test_choice_of_backend(available, backend, monkeypatch):
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: available)
    chosen = semi_structured._backend()
    assert backend == chosen.BACKEND


def test_report_reads_as_text():
    shown = str(Acceleration(["a", "b"], {"c": "it is on cpu"}))
    assert shown == "2 of 3 linears run on 2:4 kernels.\ndense: c: it is on cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    model: Any = llama(hidden_size=64, intermediate_size=128)
    model.bfloat16().cuda()
    prune(model, TWO_OF_FOUR)
    ids = tokens().cuda()
    with torch.no_grad():
        expected = model(ids).logits
        done = accelerate_2_4_(model)
        torch.testing.assert_close(model(ids).logits, expected, rtol=0.02, atol=0.1)
    assert done.converted

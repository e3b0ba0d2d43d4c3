"""Translation of state dicts, both ways."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from smp_core.errors import ArgumentError
from smp_core.torch.nn.huggingface import bert, gpt2, gptj, gptneo, roberta
from smp_core.torch.tensor_parallel.translation import Translation, pairs

TRANSLATION = Translation(
    (
        *pairs("h.{}.qkv", ["l.{}.q", "l.{}.k", "l.{}.v"], transposed=True),
        *pairs("norm", "after", "weight"),
    ),
    tied={"head.weight": "norm.weight"},
    dropped=("h.{}.mask",),
)


def theirs(prefix: str = "") -> dict[str, object]:
    state = {
        "h.0.qkv.weight": torch.arange(12.0).view(2, 6),
        "h.0.qkv.bias": torch.arange(6.0),
        "h.11.qkv.weight": -torch.arange(12.0).view(2, 6),
        "h.11.qkv.bias": -torch.arange(6.0),
        "norm.weight": torch.ones(3),
        "head.weight": torch.ones(3),
        "other": torch.zeros(1),
    }
    return {f"{prefix}{key}": value for key, value in state.items()}


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[key], value) for key, value in second.items()
    )


@pytest.mark.parametrize("prefix", ["", "model.inner."])
def test_a_state_is_translated_there_and_back(prefix):
    state = theirs(prefix)
    ours = TRANSLATION.to_ours({**state, f"{prefix}h.0.mask": torch.ones(2)}, prefix)
    assert set(ours) == {
        *(f"{prefix}l.{n}.{which}.{kind}" for n in (0, 11) for which in "qkv" for kind in ("weight", "bias")),
        f"{prefix}after.weight",
        f"{prefix}other",
    }  # fmt: skip
    weight = torch.arange(12.0).view(2, 6).t()
    assert torch.equal(ours[f"{prefix}l.0.k.weight"], weight[2:4])
    assert torch.equal(ours[f"{prefix}l.11.v.bias"], -torch.arange(6.0)[4:])
    assert same(TRANSLATION.to_theirs(ours, prefix), state)


def test_a_head_of_its_own_is_translated_there_and_back():
    state = {**theirs(), "head.weight": torch.zeros(3)}
    ours = TRANSLATION.to_ours(state)
    assert torch.equal(ours["head.weight"], torch.zeros(3))
    assert same(TRANSLATION.to_theirs(ours), state)


def test_a_tied_entry_without_its_twin_is_handed_on():
    assert set(TRANSLATION.to_ours({"head.weight": torch.ones(3)})) == {"head.weight"}
    other = {"head.weight": torch.ones(3), "norm.weight": torch.ones(3, dtype=torch.float64)}
    assert set(TRANSLATION.to_ours(other)) == {"head.weight", "after.weight"}


def test_a_buffer_outside_of_layers_is_dropped():
    plain = Translation(tuple(pairs("norm", "after", "weight")), dropped=("mask",))
    assert plain.to_ours({"mask": torch.ones(1)}) == {}


def test_entries_outside_of_the_prefix_and_values_that_are_no_tensors_are_handed_on():
    state = {**theirs("a."), "norm.weight": torch.zeros(2), "a.note": "text"}
    ours = TRANSLATION.to_ours(state, "a.")
    assert ours["norm.weight"] is state["norm.weight"]
    assert ours["a.note"] == "text"


def test_prefixes_are_found_in_states():
    both = {**theirs("a."), **theirs("b.c.")}
    assert TRANSLATION.prefixes(both) == ["a.", "b.c."]
    assert TRANSLATION.our_prefixes(TRANSLATION.to_ours(both, "b.c.")) == ["b.c."]
    assert TRANSLATION.prefixes({"xh.0.qkv.weight": 1}) == []


def test_any_key_tells_that_a_state_is_the_originals():
    assert TRANSLATION.knows({"a.norm.weight": 1}, "a.")
    assert TRANSLATION.knows({"h.3.qkv.bias": 1}, "")
    for other in ({"norm.weight": 1}, {"a.l.0.q.weight": 1}, {"a.norm.bias": 1}):
        assert not TRANSLATION.knows(other, "a.")


@pytest.mark.parametrize("gone", ["q", "k", "v"])
def test_a_state_without_a_part_of_a_tensor_is_refused(gone):
    ours = TRANSLATION.to_ours(theirs("a."), "a.")
    del ours[f"a.l.11.{gone}.weight"]
    with pytest.raises(
        ArgumentError, match=rf"no tensor 'a.l.11.{gone}.weight'.* Translate the whole"
    ):
        TRANSLATION.to_theirs(ours, "a.")


@pytest.mark.parametrize("shape", [(2, 8), (2, 2), ()])
def test_a_tensor_that_has_no_equal_parts_is_refused(shape):
    state = {"h.0.qkv.weight": torch.ones(shape)}
    with pytest.raises(ArgumentError, match=r"'h.0.qkv.weight' has the shape .* no 3 equal parts"):
        TRANSLATION.to_ours(state)


FUNCTIONS = pytest.mark.parametrize(
    ("there", "back"),
    [
        (bert.translate_hf_state_dict_to_smdistributed_bert, bert.translate_state_dict_to_hf_bert),
        (gpt2.translate_hf_state_dict_to_smdistributed_gpt2, gpt2.translate_state_dict_to_hf_gpt2),
        (gptj.translate_hf_state_dict_to_smdistributed_gptj, gptj.translate_state_dict_to_hf_gptj),
        (
            gptneo.translate_hf_state_dict_to_smdistributed_gptneo,
            gptneo.translate_state_dict_to_hf_gptneo,
        ),
        (
            roberta.translate_hf_state_dict_to_smdistributed_roberta,
            roberta.translate_state_dict_to_hf_roberta,
        ),
    ],
)


@FUNCTIONS
def test_a_state_of_another_model_is_refused(there, back):
    for function in (there, back):
        with pytest.raises(ArgumentError) as caught:
            function({"weight": torch.ones(1)})
        family = function.__module__.rpartition(".")[2]
        assert str(caught.value).startswith(
            f"{family}.{function.__name__}: the state has no layer of {family}: "
        )


@FUNCTIONS
@pytest.mark.parametrize("mark", [{"_smp_is_partial": True}, {"_smp_tensor": {"rank": 0}}])
def test_a_part_of_a_distributed_models_state_is_refused(there, back, mark):
    for function in (there, back):
        with pytest.raises(
            ArgumentError, match=r"Gather the whole first: model.state_dict\(\)"
        ) as caught:
            function({"weight": torch.ones(1), **mark})
        family = function.__module__.rpartition(".")[2]
        assert str(caught.value).startswith(f"{family}.{function.__name__}: ")


def test_old_versions_get_their_causal_masks():
    layer = {"weight": torch.ones(1, 3), "bias": torch.ones(3)}
    state = {f"transformer.h.0.attn.c_attn.{key}": value for key, value in layer.items()}
    state["transformer.h.0.ln_1.weight"] = torch.ones(1)
    ours = gpt2.translate_hf_state_dict_to_smdistributed_gpt2(state)
    found = gpt2.translate_state_dict_to_hf_gpt2(ours, max_seq_len=3)
    mask = [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert found.pop("transformer.h.0.attn.bias").tolist() == [[mask]]
    assert found.pop("transformer.h.0.attn.masked_bias").item() == -1e4
    assert same(found, state)


LAZY = """
import sys
import smp_core.torch as smp
families = ("bert", "gpt2", "gptj", "gptneo", "roberta")
assert not [each for each in families if f"smp_core.torch.nn.huggingface.{each}" in sys.modules]
for each in families:
    assert getattr(smp.nn.huggingface, each).__name__ == f"smp_core.torch.nn.huggingface.{each}"
try:
    smp.nn.huggingface.llama
except AttributeError as error:
    assert "has no attribute 'llama'" in str(error)
else:
    raise AssertionError("llama")
"""


def test_the_module_of_a_family_is_imported_at_its_first_use():
    subprocess.run([sys.executable, "-c", LAZY], check=True)

"""The table of real models: cells that are right, and differences, refusals and hangs that are told apart."""

from __future__ import annotations

import pytest
import torch

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import ExecutorOptions
from smp_core.torch.exceptions import UnsupportedTrainingError
from tools.models import architectures, compare, layouts, table
from tools.models.__main__ import main
from tools.models.compare import Cell
from tools.models.processes import Cells

CONVOLUTIONS = architectures.BY_NAME["Convolutional network"]
WORDS = architectures.BY_NAME["Tied embedding and head"]


@pytest.fixture(scope="module")
def executor():
    executor = open_backend("sim", ExecutorOptions(ranks=layouts.RANKS))
    yield executor
    executor.close()


def cell(executor, architecture, layout, body=compare.train):
    return compare.cell(executor, architecture, layouts.BY_NAME[layout], 60.0, body)


@pytest.mark.parametrize(
    ("architecture", "layout", "result", "distributed"),
    [
        (CONVOLUTIONS, "pp 2 x dp 2", "bits", 0),
        (CONVOLUTIONS, "sharded 2", "bits", 0),
        (WORDS, "tp 2", "bound", 3),
    ],
    ids=["pipeline", "sharded", "tensor"],
)
def test_a_cell_is_equal_to_plain_pytorch(executor, architecture, layout, result, distributed):
    made = cell(executor, architecture, layout)
    assert (made.result, made.detail, made.distributed) == (result, "", distributed)


def next_up(value):
    """The value with its first element one unit of rounding greater."""
    changed = value.clone()
    changed.view(-1)[0] = torch.nextafter(changed.view(-1)[0], torch.tensor(torch.inf))
    return changed


def spoiled(*names):
    """A rank's training with one value of one rank changed a little."""
    found = compare.train(*names)
    if found.replica == 1:
        found.gradients[1]["0.weight"] = next_up(found.gradients[1]["0.weight"])
    return found


def spoiled_loss(*names):
    found = compare.train(*names)
    found.losses[0] = next_up(found.losses[0])
    return found


def counted_twice(*names):
    found = compare.train(*names)
    found.buffers["1.num_batches_tracked"] += 1
    return found


def without_gradient(*names):
    found = compare.train(*names)
    found.missing[0] = {"0.bias"}
    return found


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (spoiled, "rank 1, step 1: gradient 0.weight differs in bits"),
        (spoiled_loss, "rank 0, step 0: loss of the microbatches differs in bits"),
        (counted_twice, "rank 0, step 1: buffer 1.num_batches_tracked is another"),
        (without_gradient, "rank 0, step 0: 0.bias has a gradient in one of both alone"),
    ],
)
def test_a_difference_is_a_failure(executor, body, told):
    made = cell(executor, CONVOLUTIONS, "sharded 2", body)
    assert made.result == "FAILED"
    assert told in made.detail


def off(*names):
    """A gradient that is wrong by a thousandth."""
    found = compare.train(*names)
    found.gradients[0]["head.weight"] = found.gradients[0]["head.weight"] * 1.001
    return found


def test_a_difference_beyond_the_bound_is_a_failure(executor):
    made = cell(executor, WORDS, "tp 2", off)
    assert made.result == "FAILED"
    assert "rank 0, step 0: gradient head.weight is off by" in made.detail


def test_experts_that_some_ranks_do_not_call_are_refused(executor):
    made = cell(executor, architectures.BY_NAME["Experts, some of them unused"], "sharded 2")
    assert made.result == "refused"
    assert "mismatch" in made.detail


def refusing(*names):
    raise UnsupportedTrainingError("no such models")


def test_a_refusal_that_the_table_does_not_know_is_a_failure(executor):
    made = cell(executor, CONVOLUTIONS, "pp 4", refusing)
    assert (made.result, made.detail) == ("FAILED", "UnsupportedTrainingError: no such models")


def test_a_cell_that_takes_too_long_fails_and_the_process_is_replaced():
    cells = Cells(0.0, more=0.0)
    first = cells._process
    try:
        made = cells.run("Convolutional network", "pp 4")
        assert (made.result, made.detail) == ("FAILED", "no result after 0 s")
        assert not first.is_alive()
        assert cells._process.is_alive()
    finally:
        cells.close()


def test_the_table_has_a_note_for_each_error():
    cells = [
        Cell("A", "pp 4", "bits"),
        Cell("A", "tp 2", "bound", distributed=3),
        Cell("B", "pp 4", "FAILED", "ValueError: no"),
        Cell("B", "tp 2", "bits"),
    ]
    assert list(table.lines(cells, {"A": "first", "B": "second"})) == [
        "| architecture | family | pp 4 | tp 2 |",
        "|---|---|---|---|",
        "| A | first | bits | bound |",
        "| B | second | FAILED [1] | bits, whole |",
        "",
        "1. `ValueError: no`",
    ]
    page = f"before\n{table.BEGIN}old\n{table.END}after\n"
    assert table.put(page, ["new"]) == f"before\n{table.BEGIN}new\n{table.END}after\n"


def test_the_exit_code_tells(capsys, tmp_path):
    file = tmp_path / "cells.json"
    assert main(["--only", "Dense*", "--layout", "pp 4", "--json", str(file)]) == 0
    assert '"result": "bits"' in file.read_text()
    assert main(["--only", "Dense*", "--layout", "pp 4", "--limit", "1e-9"]) == 1
    assert "1 FAILED" in capsys.readouterr().out


def test_there_are_enough_architectures():
    families = {each.family for each in architectures.ARCHITECTURES}
    assert {"convolutional", "recurrent", "mixture of experts", "shared weights"} <= families
    hugging = [each for each in architectures.ARCHITECTURES if each.family == "Hugging Face"]
    assert len(architectures.ARCHITECTURES) >= 30
    assert len(hugging) >= 15

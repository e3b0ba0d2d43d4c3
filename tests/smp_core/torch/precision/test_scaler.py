"""Loss scalers: the rules of API 1.8, against a model of them written from its text."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smp_core.errors import ArgumentError, ArgumentTypeError
from smp_core.torch.precision.scaler import DEFAULTS, DynamicLossScaler, LossScaler


def scales(overflows, init, factor, window, least, shift, consecutive):
    """After each step: how often overflow and good steps came is all that counts.

    From the text: an overflow lowers the scale if ``shift`` is 1 or the counter is 1, else the counter; a
    good step ``window * k`` after the last overflow (or the beginning) raises it and refills the counter, and with
    ``consecutive`` each good step refills it.
    """
    scale, counter, since = float(init), shift, 0
    for overflow in overflows:
        if overflow:
            since = 0
            if counter == 1:
                scale = max(scale / factor, least)
            else:
                counter -= 1
        else:
            since += 1
            if consecutive:
                counter = shift
            if since % window == 0:
                scale, counter = scale * factor, shift
        yield scale


@given(
    overflows=st.lists(st.booleans(), max_size=60),
    init=st.sampled_from([1, 2.0**10, 2**32, 12.5]),
    factor=st.sampled_from([2.0, 3, 1.5]),
    window=st.integers(1, 6),
    least=st.sampled_from([1, 0.25, 16.0]),
    shift=st.integers(1, 4),
    consecutive=st.booleans(),
)
def test_the_scale_follows_the_rules(overflows, init, factor, window, least, shift, consecutive):
    scaler = DynamicLossScaler(init, factor, window, least, shift, consecutive)
    for overflow, expected in zip(
        overflows, scales(overflows, init, factor, window, least, shift, consecutive), strict=True
    ):
        scaler.update_scale(overflow)
        assert scaler.loss_scale == expected
    other = DynamicLossScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    for overflow in (False, True, False, False, True, True) * 2:
        scaler.update_scale(overflow)
        other.update_scale(overflow)
        assert other.loss_scale == scaler.loss_scale


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_without_hysteresis_above_the_floor_it_is_torchs_scaler(overflows, window):
    ours = DynamicLossScaler(2.0**60, scale_window=window)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=window)
    theirs.scale(torch.zeros(()))
    for overflow in overflows:
        theirs._scale, theirs._growth_tracker = (
            torch._amp_update_scale_(
                theirs._scale,
                theirs._growth_tracker,
                torch.tensor(float(overflow)),
                2.0,
                0.5,
                window,
            ),
            theirs._growth_tracker,
        )
        ours.update_scale(overflow)
        assert ours.loss_scale == float(theirs._scale)


def test_the_defaults_are_the_documented_ones():
    scaler = DynamicLossScaler()
    assert scaler.loss_scale == 2**32
    assert {key: getattr(scaler, key) for key in DEFAULTS if key != "init_scale"} == {
        "scale_factor": 2.0,
        "scale_window": 1000,
        "min_scale": 1,
        "delayed_shift": 1,
        "consecutive_hysteresis": False,
    }
    grown = [scaler.update_scale(False) or scaler.loss_scale for _ in range(2000)]
    assert [
        index for index, pair in enumerate(itertools.pairwise(grown)) if pair[0] != pair[1]
    ] == [
        998,
        1998,
    ]


def test_the_floor_holds_and_the_static_scaler_stays():
    scaler = DynamicLossScaler(init_scale=4, min_scale=1)
    for _ in range(5):
        scaler.update_scale(True)
    assert scaler.loss_scale == 1
    static = LossScaler(128)
    static.update_scale(True)
    assert static.loss_scale == 128
    assert not static.dynamic
    static.loss_scale = 2
    assert LossScaler(1).load_state_dict(static.state_dict()) is None
    scaler.load_state_dict(static.state_dict())
    assert scaler.loss_scale == 2
    assert scaler.cur_iter == 5


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"init_scale": 0}, ArgumentError, "init_scale=0 must be"),
        ({"init_scale": "8"}, ArgumentTypeError, "init_scale='8' is no number"),
        ({"scale_factor": 1}, ArgumentError, "scale_factor=1 must be above 1"),
        ({"scale_window": 0}, ArgumentError, "scale_window=0 must be at least 1"),
        ({"scale_window": 2.5}, ArgumentTypeError, "scale_window=2.5 is no whole number"),
        ({"min_scale": float("inf")}, ArgumentError, "min_scale=inf must be a finite"),
        ({"delayed_shift": True}, ArgumentTypeError, "delayed_shift=True is no whole number"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        DynamicLossScaler(**arguments)


def test_a_state_of_something_else_is_refused():
    with pytest.raises(ArgumentTypeError, match="no state of a loss scaler"):
        LossScaler().load_state_dict({"scale": 1})
    with pytest.raises(ArgumentTypeError, match="lacks 'cur_iter'"):
        DynamicLossScaler().load_state_dict({"dynamic": True, "cur_scale": 1.0})

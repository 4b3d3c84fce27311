"""The page of a run alone names the cause: for each planted fault, the words that do."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

import pyopencl as cl
import pytest

from clamp import amp, session
from tests.observe.faults import FAULTS, Training, line_of

#: what the page says of a fault
WORDS = {
    "weight": "The model's layers.1.second.weight itself holds 1 inf No loss scale helps",
    "batch": "What the model is given holds 1 nan before any op has touched it",
    "forward": "What matmul_op reads is finite, and",
    "backward": "The gradient of sqrt has",
    "custom": "What overflowing reads is finite, and",
    "scale": "The loss scale of 16777216 was too high The model is sound",
}


@pytest.fixture(autouse=True)
def shut_down() -> Iterator[None]:
    yield
    session.shutdown()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_page_names_cause_op_layer_and_line(queue: cl.CommandQueue, fault: str, tmp_path: Path) -> None:
    training = Training(queue, fault)
    handle = amp.init(debug=("attribution", "summary"), loss_scale=2.0**24 if fault == "scale" else 8.0)
    for _ in range(2):
        training.step(handle)()
    handle.report(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text("utf-8")
    text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page)))
    assert WORDS[fault] in text
    assert FAULTS[fault].function in text
    assert FAULTS[fault].module in text
    assert f"faults.py:{line_of(fault)}" in text

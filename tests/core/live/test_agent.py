"""The agent of a live recovery, between two lists of members."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from ddp_core.launch.agent import Agent
from ddp_core.live.agent import LiveAgent


@pytest.mark.parametrize("is_starting", [True, False])
def test_a_request_to_stop_ends_the_wait_for_nodes_that_start_again(
    is_starting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    agent = LiveAgent.__new__(LiveAgent)
    agent._asked, agent._is_ending_workers = None, False
    live: Any = SimpleNamespace(end=said.append, close=lambda: said.append("closed"))
    agent._live = live
    meeting: Any = SimpleNamespace(
        spec=SimpleNamespace(rdzv_handler=SimpleNamespace(meeting=SimpleNamespace(is_host=False)))
    )
    agent._worker_group = meeting
    monkeypatch.setattr(Agent, "_restart_workers", lambda *_: said.append("met"))
    if is_starting:
        agent._restart_workers(meeting)
        assert said == ["broken", "closed", "met"]
        with pytest.raises(SignalException):
            agent._on_signal(signal.SIGTERM, None)
    else:
        agent._on_signal(signal.SIGTERM, None)
        assert agent._leaves_on is signal.SIGTERM

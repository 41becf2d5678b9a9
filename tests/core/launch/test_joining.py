"""How a node joins: torch ignores unknown settings silently, so the tests read back what it made of each setting."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.launch.joining import RendezvousLost, join, own_address


def test_torch_has_understood_the_settings() -> None:
    handler = join(None, "settings", (1, 3), own_address(None), join_seconds=77)
    try:
        assert isinstance(handler, DynamicRendezvousHandler)
        settings = handler.settings
        assert (settings.run_id, settings.min_nodes, settings.max_nodes) == ("settings", 1, 3)
        assert settings.timeout.join == timedelta(seconds=77)
        assert settings.timeout.last_call == timedelta(seconds=2)
        assert (settings.keep_alive_interval, settings.keep_alive_max_attempt) == (timedelta(seconds=1), 3)
    finally:
        handler.shutdown()


@pytest.mark.parametrize("endpoint", ["store", ":1234", "store:", "store:port"])
def test_an_endpoint_is_a_host_and_a_port(endpoint: str) -> None:
    with pytest.raises(UserError, match="expected HOST:PORT") as raised:
        own_address(endpoint)
    assert raised.value.exit_code == ExitCode.BAD_INPUT


def test_a_name_that_nobody_knows_may_be_known_later() -> None:
    with pytest.raises(RendezvousLost, match="the rendezvous at nowhere"):
        own_address("nowhere.invalid:1234")

"""The launcher's key-value store (torch's TCPStore), which the ranks talk through: hosted, or reached."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from placement_audit.config import RankEnv
from placement_audit.errors import IncompleteError
from placement_audit.roll import Trail

_CONNECT = 30
"""Seconds to reach the store; the launcher opens it before it starts any rank."""


def connect(env: RankEnv, environ: Mapping[str, str] | None = None) -> Any:
    """A room of our own in the launcher's key-value store (torch's Store).

    Args:
        env: this process's place.
        environ: None for this process's own.

    Raises:
        IncompleteError: it cannot be reached.
    """
    from torch.distributed import PrefixStore, TCPStore

    environ = os.environ if environ is None else environ
    hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    try:
        store = TCPStore(
            host,
            int(port),
            is_master=env.rank == 0 and not hosted,
            wait_for_workers=False,
            timeout=timedelta(seconds=_CONNECT),
            # The process group opens the same store again in this process.
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        reason = str(error).splitlines()[0].rstrip(".")
        raise IncompleteError(
            f"rank {env.rank} cannot reach the launcher's store at {host}:{port} (MASTER_ADDR, MASTER_PORT) "
            "within "
            f"{_CONNECT} s: {reason}. torchrun --standalone picks a free port by itself.",
        ) from error
    # A restarted job must not find what the last attempt left.
    return PrefixStore(f"placement_audit/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def post_place(room: Any, rank: int, trail: Trail) -> None:
    """Let the others know how far a rank is, should it be killed."""
    room.set(f"at/{rank}", json.dumps([trail.phase, trail.text]))


def places(room: Any, ranks: Iterable[int]) -> dict[int, Trail]:
    """Where each of these ranks was seen last; those that were never seen are left out."""
    found = {}
    for rank in sorted(ranks):
        if room.check([f"at/{rank}"]):
            phase, text = json.loads(room.get(f"at/{rank}"))
            found[rank] = Trail(phase=phase, text=text)
    return found


def listen() -> socket.socket:
    """A free port of this machine, taken at once: ranks may be told of it before anybody serves it."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(socket.SOMAXCONN)
    return listener


def environ_of(env: RankEnv, listener: socket.socket) -> dict[str, str]:
    """What torchrun would tell a rank, all ranks being on this machine."""
    return {
        "RANK": str(env.rank),
        "LOCAL_RANK": str(env.local_rank),
        "WORLD_SIZE": str(env.world_size),
        "LOCAL_WORLD_SIZE": str(env.world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        # torch then reaches the store that is there, and hosts none of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def serve(listener: socket.socket) -> Any:
    """Host the store in this process, on threads of its own; it lives as long as the object.

    Args:
        listener: see `listen`; taken over.
    """
    from torch.distributed import TCPStore

    host, port = listener.getsockname()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())

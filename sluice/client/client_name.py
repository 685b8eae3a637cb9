"""The name of a client that was given none: quotas bind it as well."""

from __future__ import annotations

import os
import socket

from sluice.rpc.caller_name import MAX_NAME_LENGTH

__all__ = ["default_client_name"]


def default_client_name() -> str:
    """``sluice-client@HOST:PID`` of this process, all of whose unnamed clients count as one.

    Printable ASCII, as gRPC wants metadata, of at most `MAX_NAME_LENGTH` characters.
    """
    pid = str(os.getpid())
    host = "".join(each if "!" <= each <= "~" else "?" for each in socket.gethostname())
    start = f"sluice-client@{host}"
    return f"{start[: MAX_NAME_LENGTH - len(pid) - 1]}:{pid}"

"""Free what the run's other services hold when the trainer's Job is over.

`end_of_run.py NAMESPACE JOB deployments/NAME statefulsets/NAME ...`: wait until the Job is
complete or has failed permanently, then scale the named objects to 0 through the API, as the pod's
service account. A program of the Python standard library. Exit code 0: all are scaled.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

INTERVAL_S = 10.0
TIMEOUT_S = 15.0
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_OVER = {"Complete", "Failed"}


class Api:
    """The API server.

    Args:
        base: its address.
        account: folder with the service account's token and the server's authority; the token is
            read for each call, since it is renewed.
    """

    def __init__(self, base: str, account: Path = _ACCOUNT) -> None:
        self._base, self._account = base, account
        self._context = None
        if base.startswith("https:"):
            self._context = ssl.create_default_context(cafile=str(account / "ca.crt"))

    def call(self, method: str, path: str, body: object = None) -> dict[str, object]:
        """Return the answer.

        Raises:
            OSError: there was none, or it is an error.
        """
        request = urllib.request.Request(  # noqa: S310 the cluster's own address
            f"{self._base}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {(self._account / 'token').read_text().strip()}",
                "Content-Type": "application/merge-patch+json",
                "Accept": "application/json",
            },
        )
        with urllib.request.urlopen(  # noqa: S310
            request, timeout=TIMEOUT_S, context=self._context
        ) as answer:
            found: dict[str, object] = json.load(answer)
            return found


def cluster_address() -> str:
    """Return where a pod finds the API server."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def is_over(job: dict[str, object]) -> bool:
    """Return whether nothing of the Job will run any more."""
    status = job.get("status")
    conditions = status.get("conditions") if isinstance(status, dict) else None
    return any(one.get("type") in _OVER and one.get("status") == "True" for one in conditions or ())


def wait_until_over(api: Api, namespace: str, job: str) -> None:
    """Wait until the Job is over; ignore errors of the API, and a Job that is not there yet."""
    reported = ""
    while True:
        try:
            if is_over(api.call("GET", f"/apis/batch/v1/namespaces/{namespace}/jobs/{job}")):
                return
            problem = ""
        except OSError as error:
            problem = f"{job}: {error}"
        if problem and problem != reported:
            sys.stderr.write(f"{problem}; asking again\n")
        reported = problem
        time.sleep(INTERVAL_S)


def scale_to_zero(api: Api, namespace: str, target: str) -> str:
    """Scale an object to 0; return why it failed, or nothing (also if the object is gone)."""
    path = f"/apis/apps/v1/namespaces/{namespace}/{target}/scale"
    try:
        api.call("PATCH", path, {"spec": {"replicas": 0}})
    except urllib.error.HTTPError as error:
        return "" if error.code == 404 else f"{target}: {error}"
    except OSError as error:
        return f"{target}: {error}"
    sys.stderr.write(f"{target}: scaled to 0\n")
    return ""


def main(arguments: Sequence[str], api: Api | None = None) -> int:
    """Return the exit code; 1 if an object could not be scaled, so that the pod is tried again."""
    namespace, job, *targets = arguments
    api = api or Api(cluster_address())
    wait_until_over(api, namespace, job)
    sys.stderr.write(f"{job} is over\n")
    problems = [problem for one in targets if (problem := scale_to_zero(api, namespace, one))]
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Tells Kubeflow Trainer how far a training is: `status.trainerStatus` of a TrainJob.

The controller (from 2.2 on, with its feature gate TrainJobStatus) gives every container an address,
a certificate and a token in environment variables. Rank 0 posts progress, remaining seconds and
metrics there, from a thread of its own and every five seconds at most: a controller that is slow or
gone doesn't hold up training.

Source: https://github.com/kubeflow/trainer/tree/master/docs/proposals/2779-trainjob-progress
"""

from __future__ import annotations

import datetime
import json
import os
import ssl
import threading
import time
import urllib.request
import warnings
from collections.abc import Mapping
from typing import Any

URL = "KUBEFLOW_TRAINER_SERVER_URL"
CERTIFICATE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"  # the path of a file
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # the path of a file, whose content changes every hour
PAUSE = 5.0  # seconds between two posts, which the controller asks for
PATIENCE = 5.0  # seconds that a post may take


class TrainerStatus:
    """Posts the newest status in a thread.

    Args:
        url: where.
        token: the path of the file with the bearer token.
        certificate: the path of the file with the authority's certificate; None: the system's.
    """

    def __init__(self, url: str, token: str, certificate: str | None):
        self._url, self._token, self._certificate = url, token, certificate
        self._status: dict[str, Any] | None = None  # that is to be posted
        self._ends = False
        self._changed = threading.Condition()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="trainer-status", daemon=True)
        self._thread.start()

    def tell(
        self, progress: float, remaining: float | None, metrics: Mapping[str, float | None]
    ) -> None:
        """Has a status posted, in place of one that wasn't yet.

        Args:
            progress: the share of the training that is done, from 0 to 1.
            remaining: seconds; None if they aren't known.
            metrics: by name; None for one that isn't known.
        """
        now = datetime.datetime.now(datetime.timezone.utc)
        status: dict[str, Any] = {
            "progressPercentage": min(100, max(0, int(progress * 100))),
            "metrics": [
                {"name": name, "value": f"{value:.6g}"}
                for name, value in metrics.items()
                if value is not None
            ],
            "lastUpdatedTime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        if remaining is not None:
            status["estimatedRemainingSeconds"] = max(0, round(remaining))
        with self._changed:
            self._status = status
            self._changed.notify()

    def close(self) -> None:
        """Posts the last status, and ends the thread; it takes as long as two posts at most."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join(2 * PATIENCE)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            with self._changed:
                self._changed.wait_for(lambda: self._status is not None or self._ends)
                status, self._status = self._status, None
                is_over = self._ends
            if status is None:
                continue
            self._post(status)
            end = time.monotonic() + PAUSE
            with self._changed:
                self._changed.wait_for(lambda: self._ends, end - time.monotonic())
                is_over = self._ends and self._status is None

    def _post(self, status: Mapping[str, Any]) -> None:
        try:
            with open(self._token, encoding="ascii") as file:
                token = file.read().strip()
            request = urllib.request.Request(
                self._url,
                json.dumps({"trainerStatus": status}).encode(),
                {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            )
            context = None
            if self._url.startswith("https:"):
                context = ssl.create_default_context(cafile=self._certificate)
            with urllib.request.urlopen(request, timeout=PATIENCE, context=context):
                self._warned = False
        except (OSError, ValueError) as error:  # among them what urllib raises
            if not self._warned:
                warnings.warn(
                    f"{URL}={self._url}: Kubeflow Trainer didn't take the progress of this job "
                    f"({type(error).__name__}: {error}). Training goes on, and tries again.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self._warned = True


def trainer_status(environment: Mapping[str, str] | None = None) -> TrainerStatus | None:
    """Returns where to tell the status; None if Kubeflow Trainer doesn't ask for it.

    Args:
        environment: where its variables are; None: the process's.
    """
    environment = os.environ if environment is None else environment
    url, token = environment.get(URL), environment.get(TOKEN)
    if not url or not token:
        return None
    return TrainerStatus(url, token, environment.get(CERTIFICATE) or None)

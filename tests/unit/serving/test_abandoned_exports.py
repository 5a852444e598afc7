"""An export removes what killed ones have left, and nothing of one that goes on."""

import json
import os
import subprocess
import sys
import time

from collective.serving import unfinished


def owned(folder, **changes):
    """Changes what the folder's note says of its owner."""
    path = os.path.join(folder, "owner")
    with open(path) as file:
        record = json.load(file)
    with open(path, "w") as file:
        json.dump({**record, **changes}, file)


def ended_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_is_removed(tmp_path):
    now = int(time.time())
    old = now - int(unfinished.MOST_SECONDS) - 60
    for name in (f"temp-{now}", f"temp-{now + 1}", f"temp-{now + 2}", f"temp-{old}"):
        unfinished.make(str(tmp_path / name))
    for name in (f"temp-{now + 3}", f"temp-{old - 1}", "temp-other", str(now), "notes"):
        (tmp_path / name).mkdir()
    owned(tmp_path / f"temp-{now + 1}", pid=ended_process())
    owned(tmp_path / f"temp-{now + 2}", machine="another")
    unfinished.make(str(tmp_path / f"temp-{old - 2}"))
    owned(tmp_path / f"temp-{old - 2}", machine="another")
    unfinished.remove_abandoned(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted(
        [
            f"temp-{now}",  # of this process, which lives
            f"temp-{now + 2}",  # of another host, and young
            f"temp-{old}",  # of this process, too
            f"temp-{now + 3}",  # without an owner, and young
            *("temp-other", str(now), "notes"),  # none of an export
        ]
    )


def test_there_is_no_folder_yet(tmp_path):
    unfinished.remove_abandoned(str(tmp_path / "nothing"))

"""Level api: the control plane as processes of this user, and one made-up node."""

import json
import signal
import time
from pathlib import Path

from tests.cluster.client import Cluster
from tests.cluster.control_plane import ControlPlane
from tests.cluster.credentials import write_credentials
from tests.cluster.processes import Processes
from tests.cluster.settings import Settings


def run(settings: Settings) -> None:
    """Stay in the foreground until SIGTERM or SIGINT, then take everything away; FailedError if a program ends."""
    folder = Path(settings.folder)
    settings.save()
    write_credentials(settings)
    asked_to_end: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: asked_to_end.append(received))
    processes = Processes(folder, Path(settings.programs))
    plane = ControlPlane(settings, processes)
    try:
        plane.start()
        Cluster(folder).add_node("fake0")
        plane.start_kuberay()
        plane.wait_for_accounts()
        plane.mark("ready")
        (folder / "ready.json").write_text(json.dumps(plane.times))
        print(f"ready: KUBECONFIG={folder}/admin.kubeconfig {plane.times}", flush=True)
        while not asked_to_end:
            processes.obey()
            processes.check()
            time.sleep(0.05)
    finally:
        processes.stop()

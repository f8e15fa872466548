"""`python -m rlhf_operator.ready`: whether an installed operator works; the pod of `helm test` runs it."""

import argparse
import asyncio
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rlhf_api.problems import SpecError
from rlhf_operator.cluster.client import ApiError, Client, NoClusterError
from rlhf_operator.cluster.discovery import discover
from rlhf_operator.settings import Settings

SECONDS: Final = 10


def main(arguments: Sequence[str]) -> str | None:
    """Return None if the operator is ready and the API server knows RLHFJobs; else a sentence that says why not."""
    parser = argparse.ArgumentParser(prog="python -m rlhf_operator.ready", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="file with the operator's settings (YAML)")
    parser.add_argument("--kubeconfig", type=Path, help="kubeconfig of the cluster; default: the pod's own access")
    parser.add_argument("url", help="URL of the operator's /readyz")
    options = parser.parse_args(arguments)
    try:
        settings = Settings.read(options.config)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(options.url, timeout=SECONDS) as answer:
            sys.stdout.write(f"{options.url}: {answer.read().decode().strip()}\n")
        offered = asyncio.run(_offered(settings, options.kubeconfig))
    except urllib.error.HTTPError as error:
        return f"{options.url}: {error.code}: {error.read().decode(errors='replace').strip()}"
    except OSError as error:
        return f"{options.url}: {getattr(error, 'reason', error)}"
    except (SpecError, NoClusterError, ApiError) as error:
        return str(error)
    sys.stdout.write(f"the API server knows RLHFJobs; besides them the cluster offers: {offered}\n")
    return None


async def _offered(settings: Settings, kubeconfig: Path | None) -> str:
    client = await Client.connect(kubeconfig)
    try:
        return str(await discover(client, settings))
    finally:
        await client.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

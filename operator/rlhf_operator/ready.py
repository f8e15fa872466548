"""`python -m rlhf_operator.ready URL`: whether an installed operator works; the pod of `helm test` runs it.

An operator is ready when it has listed the RLHFJobs, and the other kinds that the cluster offers.
"""

import sys
import urllib.error
import urllib.request
from typing import Final

SECONDS: Final = 10


def main(url: str) -> str | None:
    """Return None if the operator with its /readyz at this URL is ready; else a sentence that says why not."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=SECONDS) as answer:
            sys.stdout.write(f"{url}: {answer.read().decode().strip()}\n")
    except urllib.error.HTTPError as error:
        return f"{url}: {error.code}: {error.read().decode(errors='replace').strip()}"
    except OSError as error:
        return f"{url}: {getattr(error, 'reason', error)}"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""What a worker of Ray imports: not what lies in the current directory of its driver.

Ray puts that directory, and the script's, first on the path of every worker of a job. As with `own_python`, what lies
there by chance would hide rltop and the standard library.
"""

from __future__ import annotations

import os
from typing import Any


def without_current_directory(address: str = "") -> Any:
    """A job config for `ray.init`. None for `ray://`: there Ray adds no directory, and sends the object to its server.

    Ray leaves them out for a job that has a working directory of its own, and has no other word for it; a Ray that asks
    in another way adds them, as ever.
    """
    if "://" in (os.environ.get("RAY_ADDRESS", "") if address == "auto" else address):
        return None
    from ray.job_config import JobConfig

    class Elsewhere(JobConfig):  # type: ignore[misc]  # Ray is not typed
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return Elsewhere()

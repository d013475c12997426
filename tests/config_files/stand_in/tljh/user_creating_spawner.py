from systemdspawner import SystemdSpawner
from traitlets import Dict


class UserCreatingSpawner(SystemdSpawner):  # type: ignore[misc]
    user_groups = Dict(config=True)

"""What is told of MQPROC_ variables that nothing hears."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Final

from mqproc.config import ENVIRONMENT_PREFIX, FIELDS, OTHER_VARIABLES, is_of_service

_NEAR_RATIO: Final = 0.8


def environment_warnings(environment: Mapping[str, str]) -> list[str]:
    """A line for each MQPROC_ variable that nothing hears, with the one that may have been meant.

    They are no errors: Kubernetes sets MQPROC_PORT and the like by itself for a service of that name.
    """
    known = [name.upper() for name in FIELDS] + [name.removeprefix(ENVIRONMENT_PREFIX) for name in OTHER_VARIABLES]
    lines = []
    for variable in sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX)):
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if is_of_service(variable, environment):
            lines.append(f"{variable} is what Kubernetes says of a service, no option, and ignored")
        elif name not in known:
            near = difflib.get_close_matches(name, known, 1, _NEAR_RATIO)
            hint = f"; did you mean {ENVIRONMENT_PREFIX}{near[0]}?" if near else ""
            lines.append(f"{variable} is no option, and ignored{hint}")
    return lines

"""Curves in a file of the work dir, which training outlives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mmengine.logging import print_log
from mmengine.visualization import LocalVisBackend as _LocalVisBackend

from memengine.registry import VISBACKENDS


@VISBACKENDS.register_module()
class LocalVisBackend(_LocalVisBackend):
    """MMEngine's, but a full disk or a work dir that was moved does not end training.

    What cannot be written is lost to the file; checkpoints hold the curves, too. The error is said
    once, until something can be written again.

    Args:
        **kwargs: As of MMEngine's.
    """

    _failing = False

    def _dump(self, value_dict: dict[str, Any], file_path: str, file_format: str) -> None:
        path = Path(file_path)
        size = path.stat().st_size if path.exists() else 0
        try:
            super()._dump(value_dict, file_path, file_format)
        except OSError as error:
            if not self._failing:
                print_log(
                    f'curves cannot be written to {file_path} ({error.strerror}): training goes on '
                    'without, until they can',
                    'current',
                    level=40,
                )
            self._failing = True
            if path.exists():
                os.truncate(path, size)  # no half of a line, on which the report would stumble
        else:
            self._failing = False

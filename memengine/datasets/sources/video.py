"""Frames of videos: several of one video as the views of a sample."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from memengine.datasets.sources.folders import (
    MOST_PIXELS,
    SUFFIXES,
    existing_folder,
    files_below,
    load_rgb,
)
from memengine.datasets.sources.protocols import NO_LABEL
from memengine.registry import DATASETS
from memengine.suggest import import_optional

_VIDEOS = ('.mp4', '.avi', '.mkv', '.mov', '.webm', '.m4v', '.mpg', '.mpeg')


@DATASETS.register_module()
class VideoFrames:
    """Frames of each video in and below a folder, as RGB; a folder of images is a video, too.

    With several frames a sample is a list of them, in the order of time, and ``MultiCrop``, which
    must come first in the pipeline of an ``ImageDataset``, makes each view of another one. Which
    they are is drawn from the sample's seed. A single frame is the middle one, always.

    Args:
        root: The folder.
        frames: How many frames a sample has.
        distance: How many frames lie between two of them: a number, or [least, most], from which
            each distance is drawn. In a video that is shorter they lie as far apart as it allows.
        labelled: Whether the folders in ``root`` are classes, numbered in sorted order; else each
            video has the label -1.
        max_pixels: Frames of more cannot be read (see the dataset's ``on_error``).

    Raises:
        ValueError: When ``root`` is no folder or holds no video, or a setting is out of range.
        OSError: On access, when a video cannot be read.

    Cost: a video is opened for each sample, and decoded from the key frame before each frame that
    is wanted. OpenCV decodes, which MMEngine brings along; image files are read by Pillow.
    """

    def __init__(
        self,
        root: str,
        frames: int = 2,
        distance: int | Sequence[int] = (1, 30),
        labelled: bool = False,
        max_pixels: int = MOST_PIXELS,
    ) -> None:
        if frames < 1:
            raise ValueError(f'frames must be at least 1, got {frames}')
        least, most = (distance, distance) if isinstance(distance, int) else distance
        if not 1 <= least <= most:
            raise ValueError(
                f'distance must be a number of frames from 1 on, or [least, most], got {distance!r}'
            )
        self._frames, self._distance, self._max_pixels = frames, (least, most), max_pixels
        folder = existing_folder(root)
        images: dict[str, list[str]] = {}  # of each folder that holds some
        self._videos: dict[str, list[str] | None] = {}
        for file in files_below(str(folder)):
            if file.lower().endswith(_VIDEOS):
                self._videos[file] = None
            elif file.lower().endswith(SUFFIXES):
                images.setdefault(os.path.dirname(file), []).append(file)
        self._videos |= images
        self._paths = sorted(self._videos)
        if not self._paths:
            raise ValueError(
                f'there is no {", ".join(_VIDEOS)} and no folder of images in root={str(folder)!r}'
            )
        self.classes, self.labels = [], [NO_LABEL] * len(self._paths)
        if labelled:
            inside = [Path(path).relative_to(folder).parts for path in self._paths]
            for path, parts in zip(self._paths, inside, strict=True):
                if len(parts) < 2:
                    raise ValueError(f'{path!r} lies in no folder of a class; set labelled=False')
            self.classes = sorted({parts[0] for parts in inside})
            self.labels = [self.classes.index(parts[0]) for parts in inside]

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Image.Image | list[Image.Image], int]:
        path = self._paths[index]
        files = self._videos[path]
        if files is None:
            frames = self._decoded(path)
        else:
            frames = [load_rgb(files[n], self._max_pixels) for n in self._places(len(files))]
        return frames if self._frames > 1 else frames[0], self.labels[index]

    def path(self, index: int) -> str:
        """The file, or the folder of images, that sample ``index`` is read from."""
        return self._paths[index]

    def _places(self, length: int) -> list[int]:
        """Which frames of a video are taken."""
        if length < self._frames:
            raise OSError(f'it has {length} frames, fewer than the {self._frames} of a sample')
        if self._frames == 1:
            return [length // 2]
        furthest = (length - 1) // (self._frames - 1)
        least, most = (min(each, furthest) for each in self._distance)
        gaps = torch.randint(least, most + 1, (self._frames - 1,))
        first = torch.randint(length - int(gaps.sum()), (1,))
        return torch.cat([first, gaps]).cumsum(0).tolist()

    def _decoded(self, path: str) -> list[Image.Image]:
        cv2 = import_optional('cv2', 'VideoFrames', 'opencv-python-headless')
        video = cv2.VideoCapture(path)
        try:
            wide, tall = (video.get(cv2.CAP_PROP_FRAME_WIDTH), video.get(cv2.CAP_PROP_FRAME_HEIGHT))
            if wide * tall > self._max_pixels:
                raise OSError(f'its frames have more pixels than max_pixels={self._max_pixels}')
            frames = []
            for place in self._places(max(int(video.get(cv2.CAP_PROP_FRAME_COUNT)), 0)):
                video.set(cv2.CAP_PROP_POS_FRAMES, place)
                there, frame = video.read()
                if not there:
                    raise OSError(f'frame {place} cannot be decoded')
                frames.append(Image.fromarray(frame[..., ::-1].copy()))  # BGR
        finally:
            video.release()
        return frames

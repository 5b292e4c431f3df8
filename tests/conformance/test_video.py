import numpy as np
from format_suite import FormatSuite, digest_of
from videos import write_video

from dataload.sources.video.reader import VideoSource
from dataload.testing import SourceTraits

SIZE = (8, 16)


def image_of(record):
    """A gray picture that differs for any two records."""
    gray = np.frombuffer(digest_of(record, 64) * 2, np.uint8).reshape(SIZE)
    return np.repeat(gray[:, :, None], 3, 2)


class TestLossless(FormatSuite):
    """Frames without loss, each with a checksum."""

    traits = SourceTraits(
        suffix=".mkv",
        several_paths=True,
        value_types=(int,),
        empty_dataset=False,
        has_checksums=False,
        notices_cuts=False,
    )
    source, options = VideoSource, {"fields": ["frame"]}

    def write(self, path, records):
        if not records:
            raise ValueError("a video has frames")
        images = [image_of(record) for record in records]
        settings = {"level": "3", "slicecrc": "1"}
        write_video(
            path, len(images), codec="ffv1", size=SIZE, pixels="bgra", b_frames=0, options=settings, images=images
        )

    def expected(self, records):
        return [{"frame": image_of(record)} for record in records]

"""The pictures of the documentation are of the pages that the code makes now."""

from __future__ import annotations

import pytest
from PIL import Image

from scripts.pictures import IMAGES, PICTURES, stale

MOST_OF_ONE_COLOUR = 0.97
"""A page that has not loaded is one colour and a few grey boxes."""


def test_no_picture_is_older_than_its_page() -> None:
    """`make pictures` takes those that are."""
    assert stale() == []


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_shows_more_than_a_background(name: str) -> None:
    with Image.open(IMAGES / name) as image:
        small = image.convert("L")
        assert max(small.histogram()) < MOST_OF_ONE_COLOUR * small.width * small.height
        assert len(small.getcolors() or ()) > 100

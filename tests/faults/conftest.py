"""The fixture of the fault table."""

from __future__ import annotations

import pytest

from tests.faults.table import KEY, Row


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Row:
    """The row of the table that this test fills in."""
    found = Row()
    request.node.user_properties.append((KEY, found.cells))
    return found

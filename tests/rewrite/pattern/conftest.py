import pytest
from tests.support.graphs.board import Board


@pytest.fixture
def on() -> Board:
    return Board()

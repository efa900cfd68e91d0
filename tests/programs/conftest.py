import pytest

from warm import warm_clusters


@pytest.fixture(scope="module", autouse=True)
def _warm_clusters():
    with warm_clusters():
        yield

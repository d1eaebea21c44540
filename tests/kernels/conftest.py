import pytest


@pytest.fixture
def use(monkeypatch):
    return lambda backend: monkeypatch.setenv("AUTOTP_BACKEND", backend)

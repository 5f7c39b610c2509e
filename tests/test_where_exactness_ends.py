from memengine.technique import techniques
from tests.exactness import GUARD, PAGE, edges, filled


def test_page_is_as_the_tests_say():
    assert filled() == PAGE.read_text(), 'run python -m tests.exactness and look at it'


def test_every_exact_technique_is_on_it_and_nothing_else():
    found, known = {key for key, *_ in edges()}, techniques()
    exact = {key for key, technique in known.items() if technique.exactness == 'exact'}
    assert not exact - found, 'these have no test with pytest.mark.edge'
    assert not found - known.keys() - {GUARD}

from tests.reliability import PAGE, filled


def test_page_is_as_the_tests_say():
    assert filled() == PAGE.read_text(), 'run python -m tests.reliability and look at it'

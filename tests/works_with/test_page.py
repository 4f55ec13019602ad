"""The page "Works with" shows what the tests recorded."""

from table import recorded, tables, tables_of_page


def test_page_has_the_tables_of_the_recording() -> None:
    assert tables_of_page() == tables(recorded())

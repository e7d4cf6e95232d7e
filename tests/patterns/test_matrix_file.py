"""Files of matrices and counts: formats of other tools, and what is wrong with a file."""

import pytest

from crosstraffic.patterns.matrix_file import read_counts, read_matrix

MIB = 2**20


@pytest.fixture
def write(tmp_path):
    def to_file(text, name="traffic.txt"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "0 200 150\n300 0 250\n180 220 0\n", ((0, 200, 150), (300, 0, 250), (180, 220, 0)), id="nccl-tests"
        ),
        pytest.param("1e3 2.5e3\n\n 0 16\n", ((1000, 2500), (0, 16)), id="nccl-tests floats"),
        pytest.param("0 1M\n5K 0\n", ((0, MIB), (5120, 0)), id="kvbench"),
        pytest.param("0 1.5m\n2G 12B\n", ((0, 3 * MIB // 2), (2**31, 12)), id="kvbench fractions of units"),
        pytest.param("0 1.37M\n0 0", ((0, int(1.37 * MIB)), (0, 0)), id="kvbench cuts to bytes"),
        pytest.param("1, 2\n3,4", ((1, 2), (3, 4)), id="commas"),
        pytest.param("# bytes\n1 2  # rank 0\n3 4", ((1, 2), (3, 4)), id="comments"),
        pytest.param('[[0, "1K"], [2048.0, 0]]', ((0, 1024), (2048, 0)), id="JSON"),
        pytest.param("7", ((7,),), id="one rank"),
    ],
)
def test_matrices_of_other_tools(write, text, expected):
    assert read_matrix(write(text)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "traffic.txt: empty"),
        ("# nothing\n\n", "traffic.txt: empty"),
        ("1 2\n3", "traffic.txt, line 2: a byte matrix must be square: 1 cells in a matrix of 2 rows"),
        ("1 2 3\n4 5 6\n", "line 1: a byte matrix must be square: 3 cells in a matrix of 2 rows"),
        ("\n1 2\n3 -4", "line 3, cell 2: must be a finite number, not negative: '-4'; allowed: bytes from 0"),
        ("1 nan\n1 1", "line 1, cell 2: .*'nan'"),
        ("1 inf\n1 1", "line 1, cell 2: .*'inf'"),
        ("1 2T\n3 4", "line 1, cell 2: unknown suffix or not a number: '2T'; allowed: .* suffix B, K, M or G"),
        ("1 K\n3 4", "line 1, cell 2: not a number: ''"),
        ("1 x\n3 4", "line 1, cell 2: unknown suffix"),
        ("1 2-\n3 4", "line 1, cell 2: not a number: '2-'"),
        ("0.25 0.75\n0.5 0.5", "line 1, cell 1: a fraction of a byte: '0.25'"),
        ("1 1e30\n1 1", "line 1, cell 2: too large: '1e30'"),
        ("1 99999999G\n1 1", "line 1, cell 2: too large"),
        ("0 0\n0 0", "must have some cell above 0"),
        ("[]", "not empty"),
        ("[[1, 2], []]", "none empty"),
        ("[[1, 2], 3]", "lists of numbers"),
        ("[[1, true], [1, 1]]", "line 1, cell 2: unknown suffix or not a number: 'true'"),
        ('{"a": 1}', "must hold a list"),
        ("[[1, 2", "not readable JSON"),
    ],
)
def test_what_is_no_matrix(write, text, message):
    with pytest.raises(ValueError, match=message):
        read_matrix(write(text))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"missing\.txt: cannot be read"):
        read_matrix(tmp_path / "missing.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="binary: cannot be read"):
        read_counts(tmp_path / "binary")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("5 3 2", (5, 3, 2), id="a row"),
        pytest.param("5\n3\n2\n", (5, 3, 2), id="a column"),
        pytest.param("5,3,2\n1,1,1\n", (6, 4, 3), id="layers are added up"),
        pytest.param("[5, 3, 2]", (5, 3, 2), id="JSON list"),
        pytest.param("[[5, 3, 2], [1, 1, 1]]", (6, 4, 3), id="JSON layers"),
        pytest.param("0.5 0.25 0", (0.5, 0.25, 0), id="shares"),
    ],
)
def test_recorded_counts(write, text, expected):
    assert read_counts(write(text)) == expected


def test_counts_of_one_layer(write):
    path = write("5 3 2\n1 7 1\n")
    assert read_counts(path, 1) == (1, 7, 1)
    with pytest.raises(ValueError, match=r"there is no layer 2; allowed: 0 to 1"):
        read_counts(path, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("1 2\n3 4 5", "line 2: 3 counts, the first row has 2"),
        ("1 -2", "line 1, cell 2: must be a finite number, not negative: '-2'; allowed: counts from 0"),
        ("1 nan", "line 1, cell 2"),
        ("1 2K", "line 1, cell 2: not a number: '2K'"),
        ("expert,tokens\n0,5", "line 1, cell 1: not a number: 'expert'"),
        ("0 0 0", "some expert must have a count above 0"),
    ],
)
def test_what_are_no_counts(write, text, message):
    with pytest.raises(ValueError, match=message):
        read_counts(write(text))

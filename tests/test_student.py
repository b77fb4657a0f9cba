"""Student's t against the tables in books."""

import math

import pytest

from dpframe.util.student import t_around_zero

TABLE = {  # degrees of freedom: t for 95% and 99%, to three digits after the point
    1: (12.706, 63.657),
    2: (4.303, 9.925),
    3: (3.182, 5.841),
    4: (2.776, 4.604),
    5: (2.571, 4.032),
    9: (2.262, 3.250),
    10: (2.228, 3.169),
    30: (2.042, 2.750),
    120: (1.980, 2.617),
}


@pytest.mark.parametrize("degrees", TABLE)
def test_t_is_that_of_the_tables(degrees):
    found = [t_around_zero(share, degrees) for share in (0.95, 0.99)]
    assert found == pytest.approx(TABLE[degrees], abs=5.1e-4)


def test_of_one_and_of_two_degrees_it_is_their_formula_to_the_last_digits():
    for share in (0.5, 0.9, 0.95, 0.999):
        assert t_around_zero(share, 1) == pytest.approx(math.tan(share * math.pi / 2), rel=1e-12)
        of_two = share * math.sqrt(2 / (1 - share**2))
        assert t_around_zero(share, 2) == pytest.approx(of_two, rel=1e-12)


def test_of_many_degrees_it_is_the_normal_distributions():
    assert t_around_zero(0.95, 1_000_000) == pytest.approx(1.959966, abs=1e-5)

"""What `uniform_registers.stale` finds in machine code."""

import pytest

from uniform_registers import stale

LOOP = """
        /*0000*/ UMOV UR2, UR9 ;
.L_x_1:
        /*0010*/ ULEA UR4, UR2, UR9, 0x3 ;
        /*0020*/ @!P0 BRA `(.L_x_2) ;
        /*0030*/ {first} ;
        /*0040*/ HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0050*/ BRA `(.L_x_3) ;
.L_x_2:
        /*0060*/ {second} ;
        /*0070*/ HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
.L_x_3:
        /*0080*/ UIADD3 UR2, UR2, 0x1, URZ ;
        /*0090*/ @P1 BRA `(.L_x_1) ;
        /*00a0*/ EXIT ;
"""


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("UIADD3 UR6, UR4, 0x2, URZ", "UIADD3 UR6, UR4, 0x4, URZ", 0),
        ("UIADD3 UR6, UR4, 0x2, URZ", "UIADD3 UR7, UR4, 0x4, URZ", 2),  # each branch lacks what the other has written
        ("UIADD3 UR6, UR4, 0x2, URZ", "NOP", 1),
        ("@UP1 UIADD3 UR6, UR4, 0x2, URZ", "UIADD3 UR6, UR4, 0x4, URZ", 0),  # it keeps what it had, and is written
        ("NOP", "NOP", 0),  # written before the loop
    ],
)
def test_what_one_branch_alone_writes_is_found_in_the_other(first, second, found):
    read = stale(LOOP.format(first=first, second=second))
    assert sum("HGMMA" in x for x in read) == found

"""Payloads to their mean: the only folder that calls collectives."""

from gradcomp.exchange._choice import Exchange as Exchange
from gradcomp.exchange._choice import check_exchange as check_exchange
from gradcomp.exchange._choice import choose as choose
from gradcomp.exchange._collectives import Workers as Workers
from gradcomp.exchange._collectives import largest as largest
from gradcomp.exchange._collectives import pmean as pmean
from gradcomp.exchange._collectives import psum as psum
from gradcomp.exchange._fit import refit as refit
from gradcomp.exchange._messages import OwnerResiduals as OwnerResiduals
from gradcomp.exchange._messages import average_messages as average_messages
from gradcomp.exchange._messages import owner_shapes as owner_shapes
from gradcomp.exchange._notes import NOTE as NOTE
from gradcomp.exchange._notes import Parts as Parts
from gradcomp.exchange._notes import note as note
from gradcomp.exchange._plan import Message as Message
from gradcomp.exchange._plan import Plan as Plan
from gradcomp.exchange._plan import plan_messages as plan_messages
from gradcomp.exchange._selected import Selected as Selected
from gradcomp.exchange._selected import Selections as Selections
from gradcomp.exchange._selected import recall as recall
from gradcomp.exchange._selected import remember as remember
from gradcomp.exchange._selected import selected_rows as selected_rows
from gradcomp.exchange._selected import used_entries as used_entries

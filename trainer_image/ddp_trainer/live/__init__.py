"""Live recovery: the ranks that are left when one dies agree on a new membership view, and take the next step in it.

views       who takes part, and every decision on who takes part next, as pure functions
register    the views of an attempt on the volume, each written once
questions   asks other members, and tells one that has ended from one that is silent
listener    answers the other members while this one trains
watch       sees that the next member is alive, and that this one does not wait for a lost one
deciding    how one member comes to the next view: it coordinates, or waits for the one that does
membership  the protocol of one member, from a broken group to the next

docs/decisions/0015-live-recovery.md has the protocol and the reasons.
"""

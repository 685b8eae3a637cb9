"""The rollout service: one replica samples responses and takes new weights as they come."""

from services.rollout.engines.vendor.owner_watch import end_with_owner

end_with_owner()  # here, since what follows in a vendor's process takes long

"""Constants fitted anew from what load tests measured, by replaying them."""

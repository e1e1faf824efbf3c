"""Makes verl run on the CPU without the plugin's registrations: loaded through VERL_USE_EXTERNAL_MODULES."""

from distilled_rl.platforms import cpu

cpu.activate()

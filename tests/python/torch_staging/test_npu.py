"""R8.20 to R8.43: registration of host memory with an NPU, on a look-alike of AscendCL."""

import functools
import os
import subprocess
import tempfile
import unittest

import torch

from common import HAS_STATE_DICT_STAGER
from fake_npu import LOOK_ALIKE, run

run_fresh = functools.partial(run, is_loaded=False)  # nothing has opened the library yet
PAGE = os.sysconf("SC_PAGESIZE")
SHARED = "t = torch.empty(20).share_memory_(); p = t.data_ptr()\n"


def printed(result):
    """What a script printed, which must be all that there is: no message of the interpreter's, and a good end."""
    if result.code != 0 or result.errors:
        raise AssertionError(f"exit code {result.code}\n{result.output}{result.errors}")
    return result.output.split()


class Cudart(unittest.TestCase):
    def test_R8_20_the_runtime_that_is_really_there(self):
        script = "plug_in(cudart=lambda: {})\nnpu.patch_cudart()\nprint(torch.cuda.cudart())"
        self.assertEqual(printed(run(script.format("'real'"))), ["real"])
        self.assertEqual(printed(run(script.format("None").replace("print(", "print(npu.AclCudart is "))), ["True"])
        without = "FakeNpu.is_available = lambda: False\n" + script.format("None")
        self.assertEqual(printed(run(without)), ["None"])

    def test_R8_20_without_cuda_in_pytorch(self):
        script = (
            "npu.patch_cudart()\n"
            "try: print(torch.cuda.cudart() is npu.AclCudart)\n"
            "except (AssertionError, RuntimeError) as error: print(error)\n"
        )
        has_cuda = torch.backends.cuda.is_built()  # and then no driver
        said = "Found no NVIDIA driver" if has_cuda else "Torch not compiled with CUDA enabled"
        self.assertIn(said, " ".join(printed(run(script, has_npu=False))))
        self.assertEqual(printed(run("plug_in(torch.cuda.cudart)\n" + script, has_npu=False)), ["True"])

    def test_R8_21_installed_by_wrapping(self):
        script = """
def cudart(flag=1):
    "the runtime"
    return flag
plug_in(cudart)
npu.patch_cudart(); once = torch.cuda.cudart
npu.patch_cudart()
print(torch.cuda.cudart is once, once.__name__, once.__doc__.split()[1], once(flag=7), once(None) is npu.AclCudart)
npu.unpatch_cudart(); print(torch.cuda.cudart is cudart)
torch.cuda.cudart = 5; npu.patch_cudart(); print(torch.cuda.cudart)
del torch.cuda.cudart; npu.patch_cudart(); print(hasattr(torch.cuda, "cudart"))
"""
        self.assertEqual(printed(run(script)), ["True", "cudart", "runtime", "7", "True", "True", "5", "False"])

    def test_R8_26_no_flag_of_cuda_has_a_counterpart(self):
        script = """
npu.patch_cudart(); rt = torch.cuda.cudart()
ts = [torch.empty(3 * 1024).share_memory_() for _ in range(3)]
for flags, t in enumerate(ts): print(rt.cudaHostRegister(t.data_ptr(), t.nbytes, flags))
print(rt.cudaHostRegister(ts[0].data_ptr(), 1))
for t in ts: print(rt.cudaHostUnregister(t.data_ptr()))
"""
        result = run(script)
        self.assertEqual(printed(result), ["0", "0", "0", "507910", "0", "0", "0"])
        for call in result.of("aclrtHostRegister")[:3]:
            self.assertEqual(call.arguments[1:3], (str(3 * 4096), "0"))

    def test_R8_28_codes_are_the_runtimes(self):
        for code in (107000, 207000, 507899):
            script = SHARED + f"npu.patch_cudart(); rt = torch.cuda.cudart(); print(rt.cudaHostRegister(p, {PAGE}, 1), npu.registrations())"
            result = run(script, fail=f"aclrtHostRegister={code}")
            self.assertEqual(printed(result), [str(code), "{}"])
        result = run(SHARED + f"npu.aclrt_host_register(p, {PAGE}); print(npu.aclrt_host_unregister(p), len(npu.registrations()))",
                     fail="aclrtHostUnregister=507899")  # fmt: skip
        self.assertEqual(printed(result), ["507899", "1"])

    def test_R8_29_every_registration_is_a_call(self):
        script = """
ts = [torch.empty(20).share_memory_() for _ in range(5)]
for t in ts: npu.aclrt_host_register(t.data_ptr(), 4096)
for t in ts[:2]: npu.aclrt_host_unregister(t.data_ptr())
print(len(npu.registrations()))
"""
        result = run(script)
        self.assertEqual(printed(result), ["3"])
        self.assertEqual(len(result.of("aclrtHostRegister")) - len(result.of("aclrtHostUnregister")), 3)

    def test_R8_32_no_address_or_no_bytes(self):
        script = "print(*[npu.AclCudart.cudaHostRegister(*a) != 0 for a in ((0, 4096), (4096, 0))], npu.AclCudart.cudaHostUnregister(0) != 0)"
        result = run(script)
        self.assertEqual(printed(result), ["True"] * 3)
        self.assertEqual(result.calls, [])


class Library(unittest.TestCase):
    REGISTER = SHARED + f"print(npu.aclrt_host_register(p, {PAGE}), npu.aclrt_host_unregister(p))"

    def test_R8_22_loaded_at_the_first_registration(self):
        script = "maps = lambda: 'libascendcl' in open('/proc/self/maps').read()\nnpu.patch_cudart(); torch.cuda.cudart(); print(maps())\n"
        self.assertEqual(printed(run_fresh(script + self.REGISTER + "\nprint(npu._library is not None)")), ["False", "0", "0", "True"])

    def test_R8_23_found_under_each_name(self):
        for name in ("libascendcl.so", "libacl.so"):
            self.assertEqual(printed(run_fresh(self.REGISTER, library=name)), ["0", "0"])
        for name in ("lib64/libascendcl.so", "lib64/libacl.so"):
            self.assertEqual(printed(run_fresh(self.REGISTER, library=name, environment={"ASCEND_HOME_PATH": "{machine}"})), ["0", "0"])

    def test_R8_23_the_copy_of_the_process_comes_first(self):
        script = "import ctypes.util; ctypes.util.find_library = lambda name: print('asked for', name)\n"
        loaded = "ctypes.CDLL(os.environ['COPY'])\n"
        environment = {"COPY": "{machine}/there/libascendcl.so"}
        result = run_fresh(loaded + script + self.REGISTER, library="there/libascendcl.so", environment=environment)
        # Under its own name: what is mapped is the file that links lead to.
        self.assertEqual(LOOK_ALIKE.name, "libascendcl.so")
        self.assertEqual(printed(result), ["0", "0"])

    def test_R8_23_what_the_system_finds(self):
        for wanted in ("ascendcl", "acl"):
            script = f"ctypes.util.find_library = lambda name: os.environ['FOUND'] if name == {wanted!r} else None\n"
            result = run_fresh(script + self.REGISTER, library="odd/name.so", environment={"FOUND": "{machine}/odd/name.so"})
            self.assertEqual(printed(result), ["0", "0"])

    def test_R8_24_none_is_there(self):
        script = SHARED + "try: npu.aclrt_host_register(p, 4096)\nexcept RuntimeError as error: print(error)"
        result = run_fresh(script, library=None)
        text = " ".join(printed(result))
        self.assertTrue(text.startswith("Failed to load AscendCL library for host register:"), text)
        self.assertIn("cannot open shared object file", text)

    def test_R8_25_a_function_is_missing(self):
        # A library without it: the C library's mathematics.
        script = SHARED + """
import ctypes.util; ctypes.util.find_library = lambda name: "libm.so.6"
for _ in range(2):
    try: npu.aclrt_host_register(p, 4096)
    except RuntimeError as error: print("aclrtHostRegister" in str(error), npu._library)
"""
        self.assertEqual(printed(run_fresh(script, library=None)), ["True", "None"] * 2)


class Devices(unittest.TestCase):
    def test_R8_35_each_on_its_device(self):
        script = """
lib = ctypes.CDLL("libascendcl.so"); lib.aclInit(None)
ts = [torch.empty(20).share_memory_() for _ in range(2)]
def work(device):
    lib.aclrtSetDevice(device)
    print(npu.aclrt_host_register(ts[device].data_ptr(), 4096))
for device in range(2):
    thread = threading.Thread(target=work, args=(device,)); thread.start(); thread.join()
lib.aclrtSetDevice(0)
print(*[npu.aclrt_host_unregister(t.data_ptr()) for t in ts], npu._library.current_device())
"""
        result = run(script)
        self.assertEqual(printed(result), ["0", "0", "0", "0", "0"])
        self.assertEqual([call.arguments[-1] for call in result.of("aclrtHostRegister")], ["0", "1"])
        self.assertEqual([call.arguments[-1] for call in result.of("aclrtHostUnregister")], ["0", "1"])

    def test_R8_36_initialised_only_where_nobody_has(self):
        fresh = run("FakeNpu.current = 1\n" + Library.REGISTER)
        self.assertEqual(printed(fresh), ["0", "0"])
        self.assertEqual([(call.name, call.code) for call in fresh.calls][:2], [("aclInit", 0), ("aclrtSetDevice", 0)])
        self.assertEqual(fresh.of("aclrtHostRegister")[0].arguments[-1], "1")
        ready = run("lib = ctypes.CDLL('libascendcl.so'); lib.aclInit(None); lib.aclrtSetDevice(0)\n" + Library.REGISTER)
        self.assertEqual(len(ready.of("aclInit")), 1)
        other_thread = "lib = ctypes.CDLL('libascendcl.so'); lib.aclInit(None)\n" + Library.REGISTER
        again = run(other_thread)
        self.assertEqual(printed(again), ["0", "0"])
        self.assertEqual([call.code for call in again.of("aclInit")], [0, 100002])
        for result in (fresh, ready, again):
            self.assertEqual(result.of("aclFinalize"), [])

    def test_R8_42_from_several_threads(self):
        script = """
def work():
    for _ in range(50):
        t = torch.empty(2000).share_memory_()
        assert npu.aclrt_host_register(t.data_ptr(), 8192) == 0
        assert npu.aclrt_host_unregister(t.data_ptr()) == 0
threads = [threading.Thread(target=work) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
print(len(npu.registrations()))
"""
        result = run(script)
        self.assertEqual(printed(result), ["0"])
        self.assertEqual(len(result.of("aclrtHostRegister")), 200)
        self.assertTrue(all(call.code == 0 for call in result.of("aclrtHostUnregister")))


class States(unittest.TestCase):
    """_create_cpu_state_dict(share_memory=True, pin_memory=True)."""

    CREATE = "s = utils._create_cpu_state_dict({'w': torch.ones(5, 4), 'e': torch.ones(0, 8), 's': torch.tensor(3)}, True, True)\n"

    def test_R8_5_shared_and_registered(self):
        result = run(self.CREATE + "print(s['w'].is_shared(), len(npu.registrations())); del s; print(len(npu.registrations()))")
        self.assertEqual(printed(result), ["True", "1", "0"])
        [call] = result.of("aclrtHostUnregister")
        self.assertEqual(call.code, 0)
        self.assertTrue(result.is_memory_mapped_to_the_end)

    def test_R8_3_without_elements_nothing_is_registered(self):
        script = "s = utils._create_cpu_state_dict({'e': torch.ones(0, 8), 's': torch.tensor(3.)}, True, True); print(*s['e'].shape, s['s'].item())"
        result = run(script)
        self.assertEqual(printed(result), ["0", "8", "0.0"])
        self.assertEqual(result.calls, [])

    def test_R8_30_a_refusal_is_an_error(self):
        script = f"try:\n    {self.CREATE}except RuntimeError as error: print(error)"
        text = " ".join(printed(run(script, fail="aclrtHostRegister=507899")))
        self.assertIn("Registering memory failed with cudaError: 507899", text)
        self.assertIn(f"{PAGE} bytes", text)
        self.assertRegex(text, "0x[0-9a-f]+")

    def test_R8_31_a_caller_as_in_pytorch_2_7(self):
        script = """
npu.patch_cudart()
def create(n):
    t = torch.empty(n).share_memory_()
    assert torch.cuda.cudart().cudaHostRegister(t.data_ptr(), t.numel() * t.element_size(), 1) == 0
    def unpin(t):
        assert int(torch.cuda.cudart().cudaHostUnregister(t.data_ptr())) == 0, "Unpinning shared memory failed"
    weakref.finalize(t, unpin, t)
    return t
t = create(20)
print(len(npu.registrations()))
"""
        self.assertEqual(printed(run(script)), ["1"])

    def test_R8_31_pytorchs_own(self):
        script = """
import torch.distributed._state_dict_utils as theirs
npu.patch_cudart()
s = theirs._create_cpu_state_dict({'w': torch.ones(5, 4)}, True, True)
print(len(npu.registrations()))
"""
        self.assertEqual(printed(run(script)), ["1"])

    def test_R8_33_any_size(self):
        script = "s = utils._create_cpu_state_dict({str(n): torch.ones(n) for n in (1, 20, 1024, 1025, 100000)}, True, True); print(len(npu.registrations()))"
        self.assertEqual(printed(run(script)), ["5"])

    def test_R8_33_memory_that_is_shared_by_name(self):
        script = "torch.multiprocessing.set_sharing_strategy('file_system')\n" + self.CREATE + "print(len(npu.registrations())); del s; print(len(npu.registrations()))"
        self.assertEqual(printed(run(script)), ["1", "0"])

    def test_R8_34_in_pieces_all_or_none(self):
        script = f"""
pin.MAX_REGISTER_BYTES = 2 * {PAGE}
try:
    s = utils._create_cpu_state_dict({{'w': torch.ones({5 * PAGE // 4})}}, True, True)
    print(len(npu.registrations())); del s
except RuntimeError as error: print(type(error).__name__)
print(len(npu.registrations()))
"""
        good = run(script)
        self.assertEqual(printed(good), ["3", "0"])
        self.assertEqual([int(call.arguments[1]) // PAGE for call in good.of("aclrtHostRegister")], [2, 2, 1])
        bad = run(script, fail="aclrtHostRegister=507899@3")
        self.assertEqual(printed(bad), ["Failed", "0"])
        self.assertEqual([call.code for call in bad.of("aclrtHostUnregister")], [0, 0])
        self.assertTrue(good.is_memory_mapped_to_the_end and bad.is_memory_mapped_to_the_end)

    def test_R8_37_as_long_as_the_memory(self):
        script = self.CREATE + """
v = s['w'][1:3]; del s; gc.collect(); print(len(npu.registrations()))
other = torch.nn.Parameter(v); del v; print(len(npu.registrations()))
del other; print(len(npu.registrations()))
"""
        result = run(script)
        self.assertEqual(printed(result), ["1", "1", "0"])
        [register], [unregister] = result.of("aclrtHostRegister"), result.of("aclrtHostUnregister")
        self.assertEqual(unregister.arguments[0], register.arguments[0])
        self.assertTrue(result.is_memory_mapped_to_the_end)

    def test_R8_40_what_somebody_else_has_registered(self):
        script = f"""
lib = ctypes.CDLL("libascendcl.so"); lib.aclInit(None); lib.aclrtSetDevice(0)
lib.aclrtHostRegister.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p
t = torch.empty({3 * PAGE // 4}).share_memory_(); p = t.data_ptr()
print(npu.is_host_registered(p), lib.aclrtHostRegister(p, {{}}, 0, ctypes.byref(ctypes.c_void_p())))
print(npu.is_host_registered(p, {3 * PAGE}), npu.is_host_registered(p + {3 * PAGE}), len(npu.registrations()))
try: print(pin.register(t.untyped_storage()))
except pin.Failed as error: print(error.code)
print(pin.register_if_possible(t.untyped_storage()) if {{}} else None)
del t; gc.collect()
"""
        whole = run(script.format(3 * PAGE, True))
        self.assertEqual(printed(whole), ["False", "0", "True", "False", "0", "False", "True"])
        self.assertEqual(whole.of("aclrtHostUnregister"), [])
        part = run(script.format(2 * PAGE, False))
        self.assertEqual(printed(part), ["False", "0", "False", "False", "0", "507910", "None"])
        self.assertEqual(part.of("aclrtHostUnregister"), [])
        # A release that cannot tell.
        old = run("npu._loaded()._pointer_attributes = None\n" + script.format(3 * PAGE, False))
        self.assertEqual(printed(old)[-2:], ["507910", "None"])

    def test_R8_40_with_cuda(self):
        script = f"""
class Runtime:
    known = []
    @staticmethod
    def cudaHostRegister(address, size, flags): return 712
    @staticmethod
    def cudaHostUnregister(address): print("unregistered")
torch.cuda.is_available = lambda: True
plug_in(lambda: Runtime)
torch.Tensor.is_pinned = lambda tensor: tensor.data_ptr() in Runtime.known
t = torch.empty({PAGE // 2}).share_memory_(); p = t.data_ptr()
for Runtime.known in ([p, p + {2 * PAGE - 1}], [p], [p + {2 * PAGE - 1}]):
    try: print(pin.register(t.untyped_storage()))
    except pin.Failed as error: print(error.code)
del t; gc.collect()
"""
        self.assertEqual(printed(run(script)), ["False", "712", "712"])

    def test_R8_43_a_refusal_is_not_left_for_the_next_user_of_cuda(self):
        """The runtime that is really loaded is asked for its last error, once for each refusal; a real one keeps it."""
        source = "static int last; int refuse(void) { return last = 719; } int cudaGetLastError(void) { int e = last; last = 0; return e; }"
        with tempfile.TemporaryDirectory() as root:
            library = os.path.join(root, "libcudart.so.12")
            subprocess.run(["cc", "-shared", "-fPIC", "-xc", "-", "-o", library], input=source, text=True, check=True)
            script = f"""
lib = ctypes.CDLL({library!r})
class Runtime:
    def cudaHostRegister(address, size, flags): return lib.refuse()
torch.cuda.is_available = lambda: True
plug_in(lambda: Runtime)
t = torch.empty({PAGE}).share_memory_()
try: pin.register(t.untyped_storage())
except pin.Failed as error: print(error.code)
print(lib.cudaGetLastError())
"""
            self.assertEqual(printed(run(script)), ["719", "0"])

    def test_R8_38_a_failing_unregister_is_told_of(self):
        result = run(self.CREATE + "del s; print('on')", fail="aclrtHostUnregister=507899")
        self.assertEqual((result.code, result.output.split()), (0, ["on"]))
        self.assertIn("507899", result.errors)
        self.assertNotIn("Exception ignored", result.errors)
        self.assertEqual(len(result.errors.splitlines()), 1)

    def test_R8_39_nothing_is_called_at_exit(self):
        # The runtime is gone by then: torch_npu's handler, which was registered first, runs last.
        script = "atexit.register(lambda: ctypes.CDLL('libascendcl.so').aclFinalize())\n" + self.CREATE + "kept = [s]; kept.append(kept); print('on')"
        result = run(script)
        self.assertEqual(printed(result), ["on"])
        self.assertEqual(result.of("aclrtHostUnregister"), [])
        self.assertEqual(result.calls[-1].name, "aclFinalize")

    def test_R8_39_a_forked_child_does_not_unregister(self):
        script = self.CREATE + """
pid = os.fork()
if pid == 0:
    p = next(iter(npu.registrations()))
    del s; gc.collect()
    npu.aclrt_host_unregister(p)
    sys.exit(0)
print(os.waitpid(pid, 0)[1], len(npu.registrations())); del s; print(len(npu.registrations()))
"""
        result = run(script)
        self.assertEqual(printed(result), ["0", "1", "0"])
        self.assertEqual(len(result.of("aclrtHostUnregister")), 1)

    @unittest.skipUnless(HAS_STATE_DICT_STAGER, "PyTorch before 2.8")
    def test_R8_41_required_here_preferred_for_stagers(self):
        script = """

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    stager = stagers.StateDictStager(pin_memory=True, share_memory=True)
    staged = stager.stage({str(i): torch.arange(8.) + i for i in range(3)})
print(len(caught), "507899" in str(caught[0].message), len(npu.registrations()), staged["2"][1].item())
"""
        self.assertEqual(printed(run(script, fail="aclrtHostRegister=507899")), ["1", "True", "0", "3.0"])

    @unittest.skipUnless(HAS_STATE_DICT_STAGER, "PyTorch before 2.8")
    def test_R7_26_R7_27_stagers_pin_on_an_npu(self):
        script = """
state = {"w": torch.arange(8.), "tiny": torch.ones(4, dtype=torch.uint8), "none": torch.ones(0)}
stager = stagers.StateDictStager(pin_memory=True, share_memory=True)
for _ in range(3): staged = stager.stage(state)
print(stager.pin_memory, len(npu.registrations()), *staged["w"][:2].int().tolist())
del staged; stager.close(); print(len(npu.registrations()))
"""
        result = run(script)
        self.assertEqual(printed(result), ["True", "1", "0", "1", "0"])
        self.assertEqual(len(result.of("aclrtHostRegister")), 1)


if __name__ == "__main__":
    unittest.main()

/* The hot operations of brokerless.core in C: staging one event, encoding a frame, checking and decoding one.
 *
 * Optional: `core/journal/staging.py` and `core/frame.py` do the same in Python, byte for byte, and tests compare the two.
 * Every operation here does the ordinary case and declines anything else (None or False); the Python code then
 * does it, or says what is wrong with it. So errors come from one place, whatever the input is.
 *
 * Nothing here runs Python code between its first and its last change of state, and CPython runs signal handlers
 * and other threads only between bytecodes: each call is atomic to both. This is why `Lane` needs no lock of its
 * own: it looks whether a longer operation (a flush, an append) holds the token, and goes the slow way if so.
 * Making a list or a tuple counts as Python code: up to 3.11 it may run the garbage collector, and that finalizers.
 */
#include "speed.h"

PyDoc_STRVAR(pack_frame_doc,
"pack_frame(source, epoch, first_offset, table, contents, index, times, datas, content_index, keys, limit)\n--\n\n"
"The bytes of a frame, or None if there is anything unusual about it (then frame.py encodes it, or objects).");

PyDoc_STRVAR(total_bytes_doc, "total_bytes(datas)\n--\n\nThe size of a list of bytes; -1 if it has anything else in it.");

PyDoc_STRVAR(check_columns_doc,
"check_columns(raw, at, count, table, contents)\n--\n\n"
"Whether raw[at:] are the columns of `count` events that fit the header. False: frame.py must look.");

PyDoc_STRVAR(read_events_doc,
"read_events(raw, at, count, table, contents, source, epoch, first_offset, event)\n--\n\n"
"The events whose columns are raw[at:], made by calling `event`; None: frame.py must look.");

PyDoc_STRVAR(read_single_doc,
"read_single(raw, source, epoch, offset, event)\n--\n\n"
"The event of a frame that has just this one, made by calling `event`; None: frame.py must look.");

static PyMethodDef functions[] = {
    {"crc32", (PyCFunction)(void (*)(void))speed_crc32, METH_FASTCALL, "crc32(data, value=0)\n--\n\nAs zlib.crc32."},
    {"pack_frame", (PyCFunction)(void (*)(void))speed_pack_frame, METH_FASTCALL, pack_frame_doc},
    {"total_bytes", (PyCFunction)speed_total_bytes, METH_O, total_bytes_doc},
    {"check_columns", (PyCFunction)(void (*)(void))speed_check_columns, METH_FASTCALL, check_columns_doc},
    {"read_events", (PyCFunction)(void (*)(void))speed_read_events, METH_FASTCALL, read_events_doc},
    {"read_single", (PyCFunction)(void (*)(void))speed_read_single, METH_FASTCALL, read_single_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_speed",
    .m_doc = "The hot operations of brokerless.core in C.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__speed(void)
{
    crc32_prepare();
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    PyTypeObject *types[] = {&TopicType, &BatchType, &StageType, &LaneType, &ReceiverType};
    for (int i = 0; i < 5; i++)
        if (PyModule_AddType(module, types[i]) < 0) {
            Py_DECREF(module);
            return NULL;
        }
    return module;
}

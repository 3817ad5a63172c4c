/* Encoding a frame: msgpack, as msgspec writes it. */
#include "speed.h"
#include <string.h>


static uint8_t *
put_be(uint8_t *p, uint64_t v, int bytes)
{
    for (int i = bytes - 1; i >= 0; i--)
        *p++ = (uint8_t)(v >> (8 * i));
    return p;
}

static size_t
uint_size(uint64_t v)
{
    return v < 128 ? 1 : v < 256 ? 2 : v < 65536 ? 3 : v < 4294967296u ? 5 : 9;
}

static uint8_t *
put_uint(uint8_t *p, uint64_t v)
{
    if (v < 128) {
        *p++ = (uint8_t)v;
        return p;
    }
    int width = v < 256 ? 0 : v < 65536 ? 1 : v < 4294967296u ? 2 : 3;
    *p++ = (uint8_t)(0xCC + width);
    return put_be(p, v, 1 << width);
}

/* Size and writing of the head of a str (first = 0xD9), bin (0xC4) or array (0xDC); `small` counts fit one byte. */
static size_t
head_size(size_t n, size_t small, int has_8)
{
    return n < small ? 1 : has_8 && n < 256 ? 2 : n < 65536 ? 3 : 5;
}

#define STR_SIZE(n) (head_size((n), 32, 1) + (n))
#define BIN_SIZE(n) (head_size((n), 0, 1) + (n))
#define ARRAY_SIZE(n) head_size((n), 16, 0)

static uint8_t *
put_head(uint8_t *p, size_t n, size_t small, uint8_t small_mark, uint8_t first, int has_8)
{
    if (n < small) {
        *p++ = (uint8_t)(small_mark | n);
        return p;
    }
    if (has_8 && n < 256) {
        *p++ = first;
        return put_be(p, n, 1);
    }
    *p++ = (uint8_t)(first + has_8 + (n < 65536 ? 0 : 1));
    return put_be(p, n, n < 65536 ? 2 : 4);
}

static uint8_t *
put_str(uint8_t *p, const char *s, size_t n)
{
    p = put_head(p, n, 32, 0xA0, 0xD9, 1);
    memcpy(p, s, n);
    return p + n;
}

static uint8_t *
put_bin(uint8_t *p, const char *s, size_t n)
{
    p = put_head(p, n, 0, 0, 0xC4, 1);
    memcpy(p, s, n);
    return p + n;
}

static uint8_t *
put_array(uint8_t *p, size_t n)
{
    return put_head(p, n, 16, 0x90, 0xDC, 0);
}

/* Prefix (but for the CRC) and the beginning of a header; where to go on. */
static uint8_t *
begin_frame(uint8_t *start, size_t head, size_t body, const char *source, size_t source_n, uint64_t epoch)
{
    uint8_t *p = start + PREFIX_BYTES;
    memcpy(start, "\xb5\x1e\x01\x00", 4);
    put_le32(start + 4, (uint32_t)head);
    put_le32(start + 8, (uint32_t)body);
    *p++ = 0x96;
    p = put_str(p, source, source_n);
    return put_uint(p, epoch);
}

/* A str as UTF-8, or NULL without an error if it is not an ordinary one. */
static const char *
utf8(PyObject *text, Py_ssize_t *n)
{
    if (!PyUnicode_CheckExact(text))
        return NULL;
    const char *s = PyUnicode_AsUTF8AndSize(text, n);
    if (s == NULL)
        PyErr_Clear();
    return s;
}

PyObject *
speed_pack_frame(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 12) {
        PyErr_SetString(PyExc_TypeError, "pack_frame takes 12 arguments");
        return NULL;
    }
    PyObject *table = args[3], *contents = args[4], *index = args[5], *times = args[6], *datas = args[7];
    PyObject *content_index = args[8], *keys = args[9], *headers = args[11];  /* the column as msgpack, or empty */
    int64_t epoch = number(args[1]), first = number(args[2]), limit = number(args[10]);
    Py_ssize_t source_n;
    const char *source = utf8(args[0], &source_n);
    if (source == NULL || epoch < 0 || first < 0 || limit < 0 || !PyList_CheckExact(table) ||
        !PyList_CheckExact(contents) || !PyList_CheckExact(datas) || !PyList_CheckExact(keys) ||
        !PyBytes_CheckExact(index) || !PyBytes_CheckExact(times) || !PyBytes_CheckExact(content_index) ||
        !PyBytes_CheckExact(headers))
        Py_RETURN_NONE;
    Py_ssize_t n = PyList_GET_SIZE(datas), topics = PyList_GET_SIZE(table);

    /* How large it gets. */
    size_t head = 1 + STR_SIZE((size_t)source_n) + uint_size((uint64_t)epoch) + uint_size((uint64_t)first) +
                  uint_size((uint64_t)n) + ARRAY_SIZE((size_t)topics);
    for (Py_ssize_t i = 0; i < topics; i++) {
        PyObject *entry = PyList_GET_ITEM(table, i);
        Py_ssize_t name_n;
        if (!PyTuple_CheckExact(entry) || PyTuple_GET_SIZE(entry) != 3 ||
            utf8(PyTuple_GET_ITEM(entry, 0), &name_n) == NULL)
            Py_RETURN_NONE;
        int64_t seq = number(PyTuple_GET_ITEM(entry, 1)), count = number(PyTuple_GET_ITEM(entry, 2));
        if (seq < 0 || count < 0)
            Py_RETURN_NONE;
        head += 1 + STR_SIZE((size_t)name_n) + uint_size((uint64_t)seq) + uint_size((uint64_t)count);
    }
    size_t body = 1 + BIN_SIZE((size_t)PyBytes_GET_SIZE(index)) + BIN_SIZE((size_t)PyBytes_GET_SIZE(times)) +
                  ARRAY_SIZE((size_t)n) + BIN_SIZE((size_t)PyBytes_GET_SIZE(content_index)) +
                  (size_t)PyBytes_GET_SIZE(headers);
    PyObject *lists[2] = {contents, keys};
    size_t *sums[2] = {&head, &body};
    for (int k = 0; k < 2; k++) {
        Py_ssize_t entries = PyList_GET_SIZE(lists[k]), text_n;
        *sums[k] += ARRAY_SIZE((size_t)entries);
        for (Py_ssize_t i = 0; i < entries; i++) {
            if (utf8(PyList_GET_ITEM(lists[k], i), &text_n) == NULL)
                Py_RETURN_NONE;
            *sums[k] += STR_SIZE((size_t)text_n);
        }
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *data = PyList_GET_ITEM(datas, i);
        if (!PyBytes_CheckExact(data))
            Py_RETURN_NONE;
        body += BIN_SIZE((size_t)PyBytes_GET_SIZE(data));
    }
    if (PREFIX_BYTES + head + body > (size_t)limit)
        Py_RETURN_NONE;

    PyObject *raw = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(PREFIX_BYTES + head + body));
    if (raw == NULL)
        return NULL;
    uint8_t *start = (uint8_t *)PyBytes_AS_STRING(raw);
    uint8_t *p = begin_frame(start, head, body, source, (size_t)source_n, (uint64_t)epoch);
    p = put_uint(p, (uint64_t)first);
    p = put_uint(p, (uint64_t)n);
    p = put_array(p, (size_t)topics);
    for (Py_ssize_t i = 0; i < topics; i++) {
        PyObject *entry = PyList_GET_ITEM(table, i);
        Py_ssize_t name_n;
        const char *name = utf8(PyTuple_GET_ITEM(entry, 0), &name_n);
        *p++ = 0x93;
        p = put_str(p, name, (size_t)name_n);
        p = put_uint(p, (uint64_t)number(PyTuple_GET_ITEM(entry, 1)));
        p = put_uint(p, (uint64_t)number(PyTuple_GET_ITEM(entry, 2)));
    }
    for (int k = 0; k < 2; k++) {
        Py_ssize_t entries = PyList_GET_SIZE(lists[k]), text_n;
        if (k == 1) {  /* the body begins, and ends with the keys, or with headers if there are any */
            *p++ = PyBytes_GET_SIZE(headers) ? 0x96 : 0x95;
            p = put_bin(p, PyBytes_AS_STRING(index), (size_t)PyBytes_GET_SIZE(index));
            p = put_bin(p, PyBytes_AS_STRING(times), (size_t)PyBytes_GET_SIZE(times));
            p = put_array(p, (size_t)n);
            for (Py_ssize_t i = 0; i < n; i++) {
                PyObject *data = PyList_GET_ITEM(datas, i);
                p = put_bin(p, PyBytes_AS_STRING(data), (size_t)PyBytes_GET_SIZE(data));
            }
            p = put_bin(p, PyBytes_AS_STRING(content_index), (size_t)PyBytes_GET_SIZE(content_index));
        }
        p = put_array(p, (size_t)entries);
        for (Py_ssize_t i = 0; i < entries; i++) {
            const char *text = utf8(PyList_GET_ITEM(lists[k], i), &text_n);
            p = put_str(p, text, (size_t)text_n);
        }
    }
    memcpy(p, PyBytes_AS_STRING(headers), (size_t)PyBytes_GET_SIZE(headers));
    p += PyBytes_GET_SIZE(headers);
    assert((size_t)(p - start) == PREFIX_BYTES + head + body);
    uint32_t crc = crc32_of(crc32_of(0, start, 12), start + PREFIX_BYTES, head + body);
    put_le32(start + 12, crc);
    return raw;
}

/* As pack_frame, for a batch of one event without labels; NULL without an error for any other. */
PyObject *
single_frame(Batch *batch, PyObject *source_name, int64_t epoch)
{
    if (batch->count != 1 || batch->contents != NULL || PyList_GET_SIZE(batch->topics) != 1 || epoch < 0 ||
        batch->first < 0)
        return NULL;
    Py_ssize_t source_n, name_n;
    Topic *topic = (Topic *)PyList_GET_ITEM(batch->topics, 0);
    PyObject *data = PyList_GET_ITEM(batch->datas, 0);
    int64_t seq = number(PyList_GET_ITEM(batch->firsts, 0));
    const char *source = utf8(source_name, &source_n), *name = utf8(topic->name, &name_n);
    if (source == NULL || name == NULL || seq < 0 || !PyBytes_CheckExact(data))
        return NULL;
    size_t n = (size_t)PyBytes_GET_SIZE(data);
    size_t head = 1 + STR_SIZE((size_t)source_n) + uint_size((uint64_t)epoch) + uint_size((uint64_t)batch->first) +
                  1 + 1 + 1 + STR_SIZE((size_t)name_n) + uint_size((uint64_t)seq) + 1 + 1;
    size_t body = 1 + BIN_SIZE((size_t)0) + BIN_SIZE((size_t)8) + 1 + BIN_SIZE(n) + BIN_SIZE((size_t)0) + 1;
    if (PREFIX_BYTES + head + body > MAX_FRAME_BYTES)
        return NULL;
    PyObject *raw = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(PREFIX_BYTES + head + body));
    if (raw == NULL) {
        PyErr_Clear();
        return NULL;
    }
    uint8_t *start = (uint8_t *)PyBytes_AS_STRING(raw);
    uint8_t *p = begin_frame(start, head, body, source, (size_t)source_n, (uint64_t)epoch);
    p = put_uint(p, (uint64_t)batch->first);
    *p++ = 1;
    *p++ = 0x91;
    *p++ = 0x93;
    p = put_str(p, name, (size_t)name_n);
    p = put_uint(p, (uint64_t)seq);
    *p++ = 1;
    *p++ = 0x90;
    *p++ = 0x95;
    p = put_bin(p, "", 0);
    p = put_bin(p, (const char *)batch->times, 8);
    *p++ = 0x91;
    p = put_bin(p, PyBytes_AS_STRING(data), n);
    p = put_bin(p, "", 0);
    *p++ = 0x90;
    assert((size_t)(p - start) == PREFIX_BYTES + head + body);
    put_le32(start + 12, crc32_of(crc32_of(0, start, 12), start + PREFIX_BYTES, head + body));
    return raw;
}

PyObject *
speed_total_bytes(PyObject *module, PyObject *datas)
{
    (void)module;
    if (!PyList_CheckExact(datas))
        return PyLong_FromLong(-1);
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(datas); i++) {
        PyObject *data = PyList_GET_ITEM(datas, i);
        if (!PyBytes_CheckExact(data))
            return PyLong_FromLong(-1);
        total += PyBytes_GET_SIZE(data);
    }
    return PyLong_FromSsize_t(total);
}

/* Checking and decoding the columns of a frame. Every length is checked before it is believed. */
#include "speed.h"
#include <string.h>

/* As in frame.py. */
#define MAX_EVENTS 65535
#define NUMBERS ((int64_t)1 << 62)
#define MAX_TOPIC_BYTES 255

typedef struct {
    const uint8_t *index, *times, *datas, *content_index;
    size_t index_n, content_index_n;
} Columns;

static uint64_t
get_be(const uint8_t *p, int bytes)
{
    uint64_t v = 0;
    for (int i = 0; i < bytes; i++)
        v = v << 8 | p[i];
    return v;
}

/* A binary at *at; moves on behind it. False if it is not one or does not end before `end`. */
static int
get_bin(const uint8_t **at, const uint8_t *end, const uint8_t **data, size_t *n)
{
    const uint8_t *p = *at;
    if (p >= end || *p < 0xC4 || *p > 0xC6)
        return 0;
    int width = 1 << (*p - 0xC4);
    if (end - p - 1 < width)
        return 0;
    size_t size = get_be(p + 1, width);
    p += 1 + width;
    if ((size_t)(end - p) < size)
        return 0;
    *data = p;
    *n = size;
    *at = p + size;
    return 1;
}

static int
get_array(const uint8_t **at, const uint8_t *end, size_t *n)
{
    const uint8_t *p = *at;
    if (p >= end)
        return 0;
    if ((*p & 0xF0) == 0x90) {
        *n = *p & 0x0F;
        *at = p + 1;
        return 1;
    }
    if (*p != 0xDC && *p != 0xDD)
        return 0;
    int width = *p == 0xDC ? 2 : 4;
    if (end - p - 1 < width)
        return 0;
    *n = get_be(p + 1, width);
    *at = p + 1 + width;
    return 1;
}

static unsigned
get_u16(const uint8_t *p)
{
    return (unsigned)p[0] | (unsigned)p[1] << 8;
}

/* Whether the topic index fits the table: the right length, no number beyond it, each topic as often as it says. */
static int
index_fits(const Columns *c, size_t n, PyObject *table)
{
    Py_ssize_t topics = PyList_GET_SIZE(table);
    if (!c->index_n)
        return topics == 1;
    if (c->index_n != 2 * n || (size_t)topics > n)
        return 0;
    size_t *found = PyMem_Calloc((size_t)topics, sizeof(size_t));
    if (found == NULL)
        return 0;
    int fits = 1;
    for (size_t i = 0; i < n && fits; i++) {
        unsigned which = get_u16(c->index + 2 * i);
        fits = which < (size_t)topics;
        if (fits)
            found[which]++;
    }
    for (Py_ssize_t i = 0; i < topics && fits; i++) {
        PyObject *entry = PyList_GET_ITEM(table, i);
        fits = PyTuple_CheckExact(entry) && PyTuple_GET_SIZE(entry) == 3 &&
               number(PyTuple_GET_ITEM(entry, 2)) == (int64_t)found[i];
    }
    PyMem_Free(found);
    return fits;
}

/* Read the columns in raw[at:]; false if they are not the ordinary ones of `n` events, without keys. */
static int
scan(PyObject *raw, Py_ssize_t begin, size_t n, PyObject *table, PyObject *contents, Columns *c)
{
    if (!PyBytes_CheckExact(raw) || !PyList_CheckExact(table) || !PyList_CheckExact(contents) || begin < 0 ||
        begin > PyBytes_GET_SIZE(raw) || !n)
        return 0;
    const uint8_t *at = (const uint8_t *)PyBytes_AS_STRING(raw) + begin;
    const uint8_t *end = (const uint8_t *)PyBytes_AS_STRING(raw) + PyBytes_GET_SIZE(raw);
    const uint8_t *data;
    size_t size, entries;
    if (!get_array(&at, end, &entries) || entries != 5 || !get_bin(&at, end, &c->index, &c->index_n) ||
        !get_bin(&at, end, &c->times, &size) || size != 8 * n || !get_array(&at, end, &entries) || entries != n)
        return 0;
    c->datas = at;
    for (size_t i = 0; i < n; i++)
        if (!get_bin(&at, end, &data, &size))
            return 0;
    if (!get_bin(&at, end, &c->content_index, &c->content_index_n) || !get_array(&at, end, &entries) || entries ||
        at != end)
        return 0;
    size_t kinds = (size_t)PyList_GET_SIZE(contents);
    if (!c->content_index_n) {
        if (kinds > 1)
            return 0;
    }
    else {
        if (c->content_index_n != 2 * n)
            return 0;
        for (size_t i = 0; i < n; i++)
            if (get_u16(c->content_index + 2 * i) >= kinds)
                return 0;
    }
    return index_fits(c, n, table);
}

PyObject *
speed_check_columns(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 5) {
        PyErr_SetString(PyExc_TypeError, "check_columns takes 5 arguments");
        return NULL;
    }
    Columns c;
    int64_t at = number(args[1]), n = number(args[2]);
    return PyBool_FromLong(at >= 0 && n > 0 && scan(args[0], (Py_ssize_t)at, (size_t)n, args[3], args[4], &c));
}

PyObject *
speed_read_events(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 9) {
        PyErr_SetString(PyExc_TypeError, "read_events takes 9 arguments");
        return NULL;
    }
    PyObject *table = args[3], *contents = args[4], *source = args[5], *epoch = args[6], *event = args[8];
    int64_t begin = number(args[1]), n = number(args[2]), offset = number(args[7]);
    Columns c;
    if (begin < 0 || n <= 0 || n > MAX_EVENTS || offset < 0)
        Py_RETURN_NONE;
    /* Before looking at anything: making a list can run the garbage collector, and nothing after it does. */
    PyObject *events = PyList_New((Py_ssize_t)n);
    if (events == NULL)
        return NULL;
    if (!scan(args[0], (Py_ssize_t)begin, (size_t)n, table, contents, &c)) {
        Py_DECREF(events);
        Py_RETURN_NONE;
    }
    Py_ssize_t topics = PyList_GET_SIZE(table), kinds = PyList_GET_SIZE(contents);
    int64_t *seqs = PyMem_Malloc((size_t)topics * sizeof(int64_t));
    if (seqs == NULL) {
        Py_DECREF(events);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < topics; i++) {
        PyObject *entry = PyList_GET_ITEM(table, i);
        seqs[i] = PyTuple_CheckExact(entry) && PyTuple_GET_SIZE(entry) == 3 ? number(PyTuple_GET_ITEM(entry, 1)) : -1;
        if (seqs[i] < 0) {
            PyMem_Free(seqs);
            Py_DECREF(events);
            Py_RETURN_NONE;
        }
    }
    const uint8_t *at = c.datas, *end = (const uint8_t *)PyBytes_AS_STRING(args[0]) + PyBytes_GET_SIZE(args[0]);
    for (int64_t i = 0; events != NULL && i < n; i++) {
        const uint8_t *data;
        size_t size;
        uint64_t stamp = 0;
        unsigned topic = c.index_n ? get_u16(c.index + 2 * i) : 0;
        for (int k = 7; k >= 0; k--)
            stamp = stamp << 8 | c.times[8 * i + k];
        get_bin(&at, end, &data, &size);
        PyObject *found[8];
        found[0] = source;
        found[1] = epoch;
        found[2] = PyLong_FromLongLong(offset + i);
        found[3] = PyTuple_GET_ITEM(PyList_GET_ITEM(table, topic), 0);
        found[4] = PyLong_FromLongLong(seqs[topic]++);
        found[5] = PyLong_FromLongLong((int64_t)stamp);
        found[6] = PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)size);
        if (kinds)
            found[7] = PyList_GET_ITEM(contents, c.content_index_n ? get_u16(c.content_index + 2 * i) : 0);
        PyObject *made = NULL;
        if (found[2] && found[4] && found[5] && found[6])
            made = PyObject_Vectorcall(event, found, kinds ? 8 : 7, NULL);
        Py_XDECREF(found[2]);
        Py_XDECREF(found[4]);
        Py_XDECREF(found[5]);
        Py_XDECREF(found[6]);
        if (made == NULL)
            Py_CLEAR(events);
        else
            PyList_SET_ITEM(events, (Py_ssize_t)i, made);
    }
    PyMem_Free(seqs);
    return events;
}

/* A str at *at, as get_bin. */
static int
get_str(const uint8_t **at, const uint8_t *end, const uint8_t **data, size_t *n)
{
    const uint8_t *p = *at;
    if (p >= end)
        return 0;
    size_t size;
    if ((*p & 0xE0) == 0xA0)
        size = *p++ & 0x1F;
    else {
        if (*p < 0xD9 || *p > 0xDB)
            return 0;
        int width = 1 << (*p - 0xD9);
        if (end - p - 1 < width)
            return 0;
        size = get_be(p + 1, width);
        p += 1 + width;
    }
    if ((size_t)(end - p) < size)
        return 0;
    *data = p;
    *n = size;
    *at = p + size;
    return 1;
}

/* A number from 0 to NUMBERS - 1 at *at, or -1. */
static int64_t
get_number(const uint8_t **at, const uint8_t *end)
{
    const uint8_t *p = *at;
    if (p >= end)
        return -1;
    if (*p < 0x80) {
        *at = p + 1;
        return *p;
    }
    if (*p < 0xCC || *p > 0xCF)
        return -1;
    int width = 1 << (*p - 0xCC);
    if (end - p - 1 < width)
        return -1;
    uint64_t v = get_be(p + 1, width);
    *at = p + 1 + width;
    return v < (uint64_t)NUMBERS ? (int64_t)v : -1;
}

static int
get_byte(const uint8_t **at, const uint8_t *end, uint8_t wanted)
{
    if (*at >= end || **at != wanted)
        return 0;
    (*at)++;
    return 1;
}

PyObject *
speed_read_single(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 5) {
        PyErr_SetString(PyExc_TypeError, "read_single takes 5 arguments");
        return NULL;
    }
    PyObject *raw = args[0], *source = args[1], *event = args[4];
    int64_t epoch = number(args[2]), offset = number(args[3]);
    if (!PyBytes_CheckExact(raw) || !PyUnicode_CheckExact(source) || epoch < 0 || offset < 0)
        Py_RETURN_NONE;
    size_t length = (size_t)PyBytes_GET_SIZE(raw);
    const uint8_t *start = (const uint8_t *)PyBytes_AS_STRING(raw), *at = start + PREFIX_BYTES;
    if (length <= PREFIX_BYTES || length > MAX_FRAME_BYTES || start[0] != 0xB5 || start[1] != 0x1E || start[2] != 1)
        Py_RETURN_NONE;
    uint64_t head = get_le32(start + 4), body = get_le32(start + 8);
    if (PREFIX_BYTES + head + body != length)
        Py_RETURN_NONE;
    const uint8_t *end = at + head, *text, *name, *index, *times, *data;
    size_t text_n, name_n, size, data_n;
    Py_ssize_t source_n;
    const char *wanted = PyUnicode_AsUTF8AndSize(source, &source_n);
    if (wanted == NULL) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    /* The next event of this source and epoch, alone in its frame, without a content type. */
    if (!get_byte(&at, end, 0x96) || !get_str(&at, end, &text, &text_n) || text_n != (size_t)source_n ||
        memcmp(text, wanted, text_n) != 0 || get_number(&at, end) != epoch || get_number(&at, end) != offset ||
        !get_byte(&at, end, 1) || !get_byte(&at, end, 0x91) || !get_byte(&at, end, 0x93) ||
        !get_str(&at, end, &name, &name_n) || name_n > MAX_TOPIC_BYTES)
        Py_RETURN_NONE;
    int64_t seq = get_number(&at, end);
    if (seq < 0 || !get_byte(&at, end, 1) || !get_byte(&at, end, 0x90) || at != end)
        Py_RETURN_NONE;
    end += body;
    if (!get_byte(&at, end, 0x95) || !get_bin(&at, end, &index, &size) || size ||
        !get_bin(&at, end, &times, &size) || size != 8 || !get_byte(&at, end, 0x91) ||
        !get_bin(&at, end, &data, &data_n) || !get_bin(&at, end, &index, &size) || size ||
        !get_byte(&at, end, 0x90) || at != end)
        Py_RETURN_NONE;
    if (crc32_of(crc32_of(0, start, 12), start + PREFIX_BYTES, length - PREFIX_BYTES) != get_le32(start + 12))
        Py_RETURN_NONE;
    uint64_t stamp = 0;
    for (int k = 7; k >= 0; k--)
        stamp = stamp << 8 | times[k];
    PyObject *found[7];
    found[0] = source;
    found[1] = args[2];
    found[2] = args[3];
    found[3] = PyUnicode_DecodeUTF8((const char *)name, (Py_ssize_t)name_n, NULL);
    if (found[3] == NULL) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    found[4] = PyLong_FromLongLong(seq);
    found[5] = PyLong_FromLongLong((int64_t)stamp);
    found[6] = PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)data_n);
    PyObject *made = NULL;
    if (found[4] && found[5] && found[6])
        made = PyObject_Vectorcall(event, found, 7, NULL);
    for (int i = 3; i < 7; i++)
        Py_XDECREF(found[i]);
    return made;
}
